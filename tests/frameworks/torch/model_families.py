"""The models of timm and torchvision that are compared: library, name, shape of the images."""

from __future__ import annotations

import warnings

import torch

from benchmarks.models import libraries

torchvision, timm = libraries.torchvision(), libraries.timm()

SMALL = (2, 3, 64, 64)


def made(library, name, size):
    """Return a model in float64 with seeded weights and statistics, and its inputs."""
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = MAKERS[library](name, size).double()
    for key, tensor in net.named_buffers():
        if tensor.is_floating_point() and key.endswith("running_mean"):
            tensor.normal_(std=0.1)
        elif tensor.is_floating_point() and key.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    return net, [torch.randn(size, dtype=torch.float64)]


def _timm(name, size):
    # The last layers of vgg have a hundred million weights.
    return timm.create_model(
        name, **({"features_only": True} if "vgg" in name else {"num_classes": 7})
    )


def _torchvision(name, size):
    kind, _, name = name.rpartition(".")
    models = torchvision.models
    if kind == "detection":
        # With frozen layers.
        return models.detection.backbone_utils.resnet_fpn_backbone(backbone_name=name, weights=None)
    module = getattr(models, kind) if kind else models
    options = {"quantize": False} if kind == "quantization" else {}
    if kind == "segmentation":
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3") and not kind:
        # PyTorch draws these for a minute.
        options["init_weights"] = False
    net = getattr(module, name)(weights=None, **options)
    if kind == "optical_flow":
        # The rest is for float32 alone.
        return net.context_encoder
    return net.features if "vgg" in name else net


MAKERS = {"timm": _timm, "torchvision": _torchvision}

#: The smallest model of each family of timm that has batch normalisation, by the size it takes.
_OF_TIMM = {
    64: (
        "test_byobnet", "convmixer_768_32", "cpubone_nano", "cs3darknet_focus_s", "cspnext_tiny",
        "densenet121", "dla46x_c", "dpn48b", "test_efficientnet", "efficientvim_m1",
        "efficientvit_b0", "efficientvit_m0", "fasternet_t0", "fastvit_t8", "ghostnet_050",
        "hardcorenas_b", "hgnetv2_b0", "hrnet_w18_small", "iformer_t", "inception_next_atto",
        "lcnetv2_small", "lowformer_b0", "mobilenetv3_small_050", "mobilevit_xxs",
        "nasnetalarge", "nextvit_small", "pnasnet5large", "regnetx_002", "repghostnet_050",
        "repvit_m1", "res2next50", "resnest14d", "test_resnet", "resnetv2_18", "rexnet_100",
        "selecsls42", "legacy_seresnet18", "shvit_s1", "skresnet18", "starnet_s050",
        "swiftformer_xs", "tiny_vit_5m_224", "tresnet_m", "vgg11_bn", "legacy_xception",
        "xception41p", "ese_vovnet19b_slim_dw", "xcit_nano_12_p16_224", "resnet18",
        "efficientnet_b0", "mobilenetv2_050",
    ),
    96: (
        "inception_resnet_v2", "inception_v3", "inception_v4",
    ),
    160: (
        "test_coatnet",
    ),
    224: (
        "efficientformer_l1", "efficientformerv2_s0", "levit_128s", "visformer_tiny",
        "volo_d1_224", "vit_small_resnet26d_224",
    ),
    256: (
        "halonet_h1",
    ),
}  # fmt: skip
TIMM = [("timm", name, (2, 3, size, size)) for size, names in _OF_TIMM.items() for name in names]
_OF_TORCHVISION = {
    SMALL: (
        "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "googlenet",
        "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5",
        "efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf",
        "segmentation.fcn_resnet50", "segmentation.deeplabv3_mobilenet_v3_large",
        "segmentation.lraspp_mobilenet_v3_large", "quantization.resnet18",
        "quantization.mobilenet_v2", "quantization.mobilenet_v3_large",
        "quantization.shufflenet_v2_x0_5", "quantization.googlenet", "detection.resnet18",
    ),
    (2, 3, 224, 224): ("maxvit_t",),
    (2, 3, 299, 299): ("inception_v3", "quantization.inception_v3"),
    (2, 3, 8, 32, 32): ("video.r3d_18", "video.mc3_18", "video.r2plus1d_18"),
    (2, 3, 16, 224, 224): ("video.s3d",),
    (1, 3, 128, 128): ("optical_flow.raft_large",),
}  # fmt: skip
TORCHVISION = [
    ("torchvision", name, size) for size, names in _OF_TORCHVISION.items() for name in names
]

#: Quick ones that tell: additions, activations of each kind, branches, frozen layers.
TINY = (2, 3, 32, 32)
QUICK = [
    ("timm", "test_resnet", SMALL),
    ("timm", "test_efficientnet", SMALL),
    ("timm", "mobilenetv3_small_050", TINY),
    ("timm", "ghostnet_050", TINY),
    ("timm", "efficientvit_m0", SMALL),
    ("torchvision", "resnet18", TINY),
    ("torchvision", "shufflenet_v2_x0_5", TINY),
    ("torchvision", "mobilenet_v2", TINY),
    ("torchvision", "detection.resnet18", TINY),
]
#: Compiled ones.
FEW = [
    ("timm", "test_resnet", SMALL),
    ("timm", "mobilenetv3_small_050", SMALL),
    ("torchvision", "resnet18", SMALL),
    ("torchvision", "mobilenet_v2", SMALL),
    ("torchvision", "detection.resnet18", SMALL),
]
