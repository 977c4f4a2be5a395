"""The matrices of a checkpoint as another engine rounds them to int4, without running that engine.

    python scripts/peers/rounding.py onnxruntime 32 CHECKPOINT OUT.safetensors
    python scripts/peers/rounding.py nncf 128 CHECKPOINT OUT.safetensors    # where nncf and openvino are
    python scripts/peers/frontier.py ... --rounded onnxruntime-genai,int4/32=OUT.safetensors

Symmetric blocks along the inputs, every matrix, as scripts/peers/{genai,openvino}_peer.py ask for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

Floats = NDArray[np.float32]
SCALE_BITS = {"onnxruntime": 32, "nncf": 16}


def onnxruntime(weight: Floats, block: int) -> Floats:
    """[out, in] by the quantizer that onnxruntime-genai's model builder calls."""
    from onnxruntime.capi._pybind_state import quantize_matmul_4bits

    outs, ins = weight.shape
    blocks = -(-ins // block)
    packed = np.zeros((outs, blocks, block // 2), np.uint8)
    scales = np.zeros((outs, blocks), np.float32)
    zeros = np.zeros((outs, -(-blocks // 2)), np.uint8)
    columns = np.zeros((blocks * block, outs), np.float32)
    columns[:ins] = weight.T
    quantize_matmul_4bits(packed, columns, scales, zeros, block, outs, ins, True)
    values = np.stack([packed & 15, packed >> 4], -1).reshape(outs, blocks, block)
    rounded = (values.astype(np.float32) - 8) * scales[..., None]
    return np.ascontiguousarray(rounded.reshape(outs, -1)[:, :ins], np.float32)


def nncf(weight: Floats, block: int) -> Floats:
    """[out, in] by NNCF, which optimum-intel calls."""
    import nncf as package
    import openvino as ov
    from openvino import opset13 as ops

    if weight.shape[1] % block:  # NNCF leaves such matrices to a smaller format
        raise SystemExit(f"{weight.shape[1]} inputs are no multiple of {block}.")
    read = ops.parameter([1, weight.shape[1]], np.float32)
    product = ops.matmul(read, ops.constant(weight), False, True)
    mode = package.CompressWeightsMode.INT4_SYM
    model: Any = package.compress_weights(
        ov.Model([product], [read]), mode=mode, group_size=block, ratio=1.0, all_layers=True
    )
    (multiplied,) = (node for node in model.get_ops() if node.get_type_name() == "MatMul")
    alone = ov.Model([multiplied.input_value(1)], [])
    return np.asarray(ov.compile_model(alone, "CPU")([])[0], np.float32)


def main() -> None:
    """Writes the rounded matrices by their names."""
    how, block, checkpoint, out = sys.argv[1:]
    made = {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if len(file.get_slice(name).get_shape()) == 2:
                    weight = file.get_tensor(name).float().numpy()
                    made[name] = {"onnxruntime": onnxruntime, "nncf": nncf}[how](weight, int(block))
    save_file(made, out, {"bits": str(4 + SCALE_BITS[how] / int(block))})


if __name__ == "__main__":
    main()
