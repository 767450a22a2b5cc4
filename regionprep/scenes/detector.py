"""The detector of scenes: torchvision's Faster R-CNN over a small backbone.

As in bottom-up attention (arXiv 1707.07998), the pooled feature of a box also predicts its
attributes (here colour, texture and size) in training, so that the feature carries them and not
the class alone.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, channels_last, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

from regionprep.scenes.layout import CLASSES, HEIGHT, SIZES, WIDTH
from regionprep.scenes.shapes import COLOURS, TEXTURES

WEIGHTS = Path(__file__).with_name("detector.safetensors")
"""The shipped weights; their metadata tell the command, seed and AP50."""

FEATURE_WIDTH = 256
"""Width of a box's pooled feature."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "colour": COLOURS,
    "texture": TEXTURES,
    "size": tuple(SIZES),
}

_POOLED = 6
_ANCHORS = (24, 38, 64)


def build(weights: Path | None = None) -> FasterRCNN:
    """Return the trained detector in eval mode, with the shipped weights or those in a file.

    Its labels count from 1 (0 is the background): label l is `CLASSES[l - 1]`.
    """
    model = untrained()
    model.load_state_dict(load_file(weights or WEIGHTS))
    return model.eval()


def untrained() -> FasterRCNN:
    """Return the detector with random weights, in training mode."""
    backbone = Backbone()
    model = FasterRCNN(
        backbone,
        min_size=HEIGHT,
        max_size=WIDTH,
        image_mean=[0.8, 0.8, 0.8],
        image_std=[0.25, 0.25, 0.25],
        size_divisible=Backbone.stride,
        rpn_anchor_generator=AnchorGenerator(sizes=(_ANCHORS,), aspect_ratios=((1.0,),)),
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_train=80,
        rpn_post_nms_top_n_test=40,
        rpn_batch_size_per_image=64,
        rpn_fg_iou_thresh=0.6,
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=_POOLED, sampling_ratio=2),
        box_head=TwoMLPHead(backbone.out_channels * _POOLED**2, FEATURE_WIDTH),
        box_predictor=Predictor(FEATURE_WIDTH),
        box_batch_size_per_image=32,
        box_positive_fraction=0.4,
        box_detections_per_img=40,
    )
    return model.to(memory_format=channels_last)


class Backbone(nn.Module):
    """Seven convolutions down to an eighth of the image's resolution, and back up to a quarter.

    The quarter is what tells the shapes of small objects apart (arXiv 1612.03144, one level).
    """

    out_channels = 64
    stride = 8

    def __init__(self) -> None:
        super().__init__()
        self.quarter = nn.Sequential(
            _block(3, 24, stride=2), _block(24, 48, stride=2), _block(48, 48)
        )
        self.eighth = nn.Sequential(
            _block(48, 96, stride=2), _block(96, 96), _block(96, 96), _block(96, 96)
        )
        self.lateral = nn.Conv2d(48, self.out_channels, 1)
        self.top_down = nn.Conv2d(96, self.out_channels, 1)

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> Float[Tensor, "b c y x"]:
        """Return the feature map of images whose sides are multiples of the stride."""
        quarter = self.quarter(images.contiguous(memory_format=channels_last))
        context = self.top_down(self.eighth(quarter))
        features: Tensor = self.lateral(quarter) + F.interpolate(context, scale_factor=2.0)
        return features


class Predictor(FastRCNNPredictor):  # type: ignore[misc]
    """Classes and box offsets of a pooled feature and, when asked, its attributes."""

    def __init__(self, width: int) -> None:
        super().__init__(width, len(CLASSES) + 1)
        self.attribute = nn.ModuleDict(
            {name: nn.Linear(width, len(values)) for name, values in ATTRIBUTES.items()}
        )

    def attributes(self, features: Float[Tensor, "r f"]) -> dict[str, Float[Tensor, "r values"]]:
        """Return the logits of each attribute's values."""
        return {name: predict(features) for name, predict in self.attribute.items()}


def _block(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
