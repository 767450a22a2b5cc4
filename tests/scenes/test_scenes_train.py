import pytest
import torch
from safetensors import safe_open

from regionprep import scenes
from regionprep.errors import InputError
from regionprep.scenes import train
from regionprep.scenes.detector import build


def test_command_trains_and_writes_weights_with_their_metadata(tmp_path, capsys):
    path = tmp_path / "detector.safetensors"
    settings = "--seed 3 --steps 2 --batch-images 2 --threads 1 --test 4"
    train.main([*settings.split(), "--output", str(path)])
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "AP50" in printed
    with safe_open(path, "pt") as file:
        known = file.metadata()
    assert known["command"] == f"python -m regionprep.scenes.train {settings}"
    assert known["seed"] == "3"
    assert 0 <= float(known["ap50"]) <= 1
    assert list(tmp_path.iterdir()) == [path]
    assert not build(path).training


def test_same_seed_trains_the_same_weights():
    settings = {"steps": 2, "batch_images": 2}
    first = train.train(seed=1, **settings).state_dict()
    again = train.train(seed=1, **settings).state_dict()
    other = train.train(seed=2, **settings).state_dict()
    name = "roi_heads.box_head.fc7.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_no_steps_are_refused():
    with pytest.raises(InputError, match="both must be 1 or more"):
        train.train(seed=0, steps=0, batch_images=2)


class Oracle:
    """A detector that knows the true boxes of some scenes, and may be made to err."""

    def __init__(self, held_out, *, shift=0.0, label_shift=0):
        self.found = []
        for scene in held_out:
            corners, classes = scenes.boxes(scene)
            self.found.append(
                {
                    "boxes": torch.from_numpy(corners) + shift,
                    "labels": (torch.from_numpy(classes).long() + label_shift) % 8 + 1,
                    "scores": torch.ones(len(corners)),
                }
            )

    def __call__(self, images):
        found, self.found = self.found[: len(images)], self.found[len(images) :]
        return found


def test_average_precision_is_one_for_the_truth_and_less_for_errors():
    held_out = [scenes.scene(0, index) for index in range(20)]
    assert train.average_precision(Oracle(held_out), held_out) == pytest.approx(1)
    assert train.average_precision(Oracle(held_out, shift=2.0), held_out) > 0.95
    assert train.average_precision(Oracle(held_out, shift=25.0), held_out) < 0.5
    assert train.average_precision(Oracle(held_out, label_shift=1), held_out) < 0.1
