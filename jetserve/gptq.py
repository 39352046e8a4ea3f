"""GPTQ from Python, in the shape that users of other libraries know.

    quantizer = GPTQQuantizer(bits=4, dataset="text.txt", group_size=128)
    quantizer.quantize_model("owner/name")
    quantizer.save("folder")
    engine = load_quantized_model("folder")

Owns the translation of these libraries' settings into `convert.convert`'s. What it makes is a converted checkpoint, the
same that `convert_checkpoints.py --quantize_method=gptq` makes.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetserve.checkpoint import hub
from jetserve.checkpoint.native_writer import check_output
from jetserve.config import EngineConfig, ModelSource
from jetserve.convert import ConversionReport, convert
from jetserve.default_model import default_cache_dir
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.method_config import CalibrationConfig, Clip, GPTQConfig, Scaling
from jetserve.quantize.qarray import QuantizationConfig
from jetserve.tokenizer import Tokenizer

PER_CHANNEL = -1


class GPTQQuantizer:
    """Quantizes the linear layers of a model by GPTQ."""

    def __init__(
        self,
        bits: int = 4,
        *,
        dataset: str | Path | Sequence[str],
        group_size: int = 128,
        desc_act: bool = False,
        static_groups: bool = False,
        sym: bool = True,
        damp_percent: float = 0.01,
        mse: bool = False,
        sweeps: int = 0,
        scale_inputs: Scaling = Scaling.NONE,
        nsamples: int | None = None,
        model_seqlen: int | None = None,
        strict: bool = False,
    ) -> None:
        """Checks the settings.

        Args:
          bits: 4 or 8.
          dataset: a file of plain text, JSONL or Parquet, `owner/name/FILE` of a data set on the hub, or texts.
          group_size: weights that share a scale, a multiple of 32; -1 for one scale an output.
          desc_act: round the rows with the largest inputs first; groups keep their places.
          static_groups: take scales from the weights as they were also without `desc_act`.
          sym: whether there are no zero points.
          damp_percent: of the mean of the Hessian's diagonal, added to it: 0.01 is one percent.
          mse: search scales for the least squared error.
          sweeps: how often scales and integers are gone over again once all are there.
          scale_inputs: how inputs are scaled before, where what comes before them can take the scales.
          nsamples: windows of the data set; None is as many as there are, up to 128.
          model_seqlen: tokens of each; None is 2048, or what the model was made for if that is less.
          strict: whether a weight that cannot be done is an error.

        Raises:
          ValueError: for settings out of range.
        """
        self._quantization = QuantizationConfig(
            bits=bits, block_size=None if group_size == PER_CHANNEL else group_size, symmetric=sym
        )
        self._method = GPTQConfig(
            calibration=CalibrationConfig(**_text(dataset), samples=nsamples, length=model_seqlen),
            clip=Clip.MSE if mse else Clip.NONE,
            scaling=scale_inputs,
            sweeps=sweeps,
            act_order=desc_act,
            static_groups=static_groups,
            damping=damp_percent,
            strict=strict,
        )
        self._folder: tempfile.TemporaryDirectory | None = None

    def quantize_model(self, model: str | Path, tokenizer: Tokenizer | None = None) -> ConversionReport:
        """Quantizes a model into a temporary folder, which `save` copies.

        Args:
          model: a checkpoint of any format, or a hub id.
          tokenizer: in place of the checkpoint's own.

        Raises:
          CheckpointError, ValueError: as `convert.convert`.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="jetserve-gptq-")
        return convert(
            hub.local_path(model),
            self._made,
            quantize_type=self._quantization.name,
            block_size=self._quantization.block_size,
            symmetric=self._quantization.symmetric,
            method=self._method,
            tokenizer=tokenizer,
        )

    @property
    def _made(self) -> Path:
        if self._folder is None:
            raise ValueError("nothing was quantized yet; call quantize_model first")
        return Path(self._folder.name) / "model"

    def save(self, folder: str | Path) -> None:
        """Writes what was quantized to a folder that does not exist; raises CheckpointError if it does."""
        made, folder = self._made, Path(folder).expanduser()
        check_output(folder)
        shutil.copytree(made, folder, dirs_exist_ok=True)


def _text(dataset: str | Path | Sequence[str]) -> dict[str, Any]:
    """As `CalibrationConfig` takes it."""
    if isinstance(dataset, str | Path):
        return {"file": Path(dataset).expanduser()}
    return {"texts": tuple(dataset)}


def load_quantized_model(folder: str | Path, config: EngineConfig | None = None) -> Engine:
    """An engine for a converted checkpoint, ready to `run` requests. Raises as `build_engine`."""
    source = ModelSource(checkpoint_path=str(folder), cache_dir=default_cache_dir())
    return build_engine(source, config or EngineConfig())
