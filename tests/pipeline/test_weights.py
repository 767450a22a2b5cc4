"""Files of weights: what is read, what is refused, what is said of what does not fit."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.pipeline import weights as module
from regionprep.pipeline.weights import Weights, fetch_hub, fetch_url, fit


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_safetensors_and_pickles_of_tensors_are_read_alike(tmp_path, network):
    state = network.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "b.pt"
    )
    for name in ("a.safetensors", "a.pt", "b.pt"):
        read = Weights.of_file(tmp_path / name).read()
        assert read.keys() == state.keys()
        assert all(torch.equal(read[key], state[key]) for key in state)


def test_a_pickle_that_runs_a_command_is_refused_unrun(tmp_path):
    proof = tmp_path / "proof"
    torch.save({"weight": Command(f"touch {proof}")}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt: holds more than tensors.*\n.*safetensors"):
        Weights.of_file(tmp_path / "evil.pt").read()
    assert not proof.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04K\x01.", bytes(range(256)) * 40])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_what_is_no_file_of_weights_is_refused(tmp_path, content, name):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=name):
        Weights.of_file(path).read()


@pytest.mark.parametrize("content", [{}, [1, 2], {"epoch": 3}, {"state_dict": {}}])
def test_a_file_without_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"holds no tensors|other things than tensors"):
        Weights.of_file(tmp_path / "a.pt").read()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"gone\.pt: no such file"):
        Weights.of_file(tmp_path / "gone.pt")


def test_the_fingerprint_is_that_of_the_file(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"abc")
    assert Weights.of_file(tmp_path / "a.pt").sha256 == hashlib.sha256(b"abc").hexdigest()


def test_counters_of_batch_norms_may_be_missing(network):
    state = {name: torch.ones_like(value) for name, value in network.state_dict().items()}
    del state["1.num_batches_tracked"]
    fit(network, state, where="file")
    assert network[0].weight.eq(1).all()


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(network):
    before = network[0].weight.clone()
    state = dict(network.state_dict())
    state["0.weight"] = torch.ones(2, 4)
    state["2.weight"] = state.pop("0.bias")
    with pytest.raises(MismatchError) as caught:
        fit(network, state, where="some.pt")
    told = str(caught.value)
    assert "some.pt" in told
    assert "0.weight: 2 x 4 in the file, 2 x 3 in the network" in told
    assert "0.bias is not in the file" in told
    assert "2.weight is not in the network" in told
    assert torch.equal(network[0].weight, before)


def test_only_the_first_few_that_differ_are_listed():
    with pytest.raises(MismatchError, match="and 5 more"):
        fit(nn.Linear(1, 1), {f"layer{number}": torch.ones(1) for number in range(8)}, where="f")


def test_without_a_network_the_file_its_address_and_its_place_are_told(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(MissingError) as caught:
        fetch_url("https://example.org/net-1234.pth", origin="net")
    told = str(caught.value)
    assert "no route to host" in told
    assert "https://example.org/net-1234.pth" in told
    assert str(tmp_path / "checkpoints" / "net-1234.pth") in told
    assert "--weights FILE" in told


def test_a_file_in_the_cache_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "net.pth").write_bytes(b"x")
    assert fetch_url("https://example.org/net.pth", origin="net").path.read_bytes() == b"x"


def test_without_a_network_the_hubs_file_and_its_address_are_told(monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(MissingError) as caught:
        fetch_hub("nobody/nothing", ("a.safetensors", "a.bin"), origin="net")
    told = str(caught.value)
    assert "no route to host" in told
    assert "https://huggingface.co/nobody/nothing/resolve/main/a.safetensors" in told


def test_loading_runs_no_pickle_but_by_the_weights_only_loader(tmp_path, monkeypatch):
    seen = []
    load = torch.load
    monkeypatch.setattr(
        module.torch, "load", lambda *a, **k: seen.append(k["weights_only"]) or load(*a, **k)
    )
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pth")
    Weights.of_file(tmp_path / "a.pth").read()
    assert seen == [True]
