"""The command line of `convert_checkpoints.py`, in `flags`' way."""

from absl import flags

from jetserve.config import EXPORT_FORMATS, ConvertConfig, ModelSource
from jetserve.flags import FLAGS, cache_dir, define, define_cache_dir, define_quantization, path_of, quantize_type
from jetserve.method_config import (
    SMOOTHING,
    AutoConfig,
    AWQConfig,
    CalibrationConfig,
    Clip,
    GPTQConfig,
    MethodConfig,
    RTNConfig,
    Scaling,
    SmoothQuantConfig,
)

METHODS = (RTNConfig.NAME, GPTQConfig.NAME, AWQConfig.NAME, SmoothQuantConfig.NAME, AutoConfig.NAME)
AUTO_SWEEPS = 4
NATIVE_FORMAT = "jetserve"
CALIBRATION_FLAGS = ("calibration_file", "calibration_samples", "calibration_length", "strict")
GPTQ_FLAGS = ("gptq_act_order", "gptq_static_groups", "gptq_damping", "gptq_sweeps", "scale_inputs")


def define_convert() -> None:
    """What convert_checkpoints.py reads and writes."""
    define(
        flags.DEFINE_string,
        "input_checkpoint_dir",
        None,
        "A Hugging Face, jetstream-pytorch or Meta folder, a GGUF file, or a hub id (unset: the default model).",
    )
    define(flags.DEFINE_string, "output_checkpoint_dir", None, "The folder to write; it must not exist.")
    define_quantization()
    define_method()
    define(
        flags.DEFINE_enum,
        "output_format",
        NATIVE_FORMAT,
        (NATIVE_FORMAT, *EXPORT_FORMATS),
        "What is written: jetserve's own format, or a Hugging Face folder for other tools, quantized as GPTQ (v2) or"
        " compressed-tensors.",
    )
    define(
        flags.DEFINE_bool, "dry_run", False, "Print what each tensor would become and the final size; write nothing."
    )
    define_cache_dir("Where fetched models and the CPU kernels are kept")


def define_method() -> None:
    """How linear layers are rounded."""
    define(
        flags.DEFINE_enum,
        "quantize_method",
        "rtn",
        METHODS,
        "How linear layers are rounded. rtn: to nearest. gptq: so that what a layer computes of calibration text"
        " changes little; takes minutes. awq: to nearest, with inputs scaled before so that less changes."
        " smoothquant: to nearest, with inputs evened out before, for --quantize_activation."
        " auto: by gptq and all that makes it better, each layer to the type that --target_bits is best spent with.",
    )
    define(
        flags.DEFINE_float,
        "target_bits",
        None,
        "auto: bits a weight of the linear layers, scales and zero points among them.",
    )
    define(
        flags.DEFINE_enum,
        "clip",
        Clip.NONE.value,
        [clip.value for clip in Clip],
        "How scales of linear layers are chosen. none: to span the range of the weights. mse: for the least squared"
        " error.",
    )
    _define_calibration()
    _define_scaling()
    _define_gptq()


def _define_calibration() -> None:
    """What a method learns from, and what it does where it cannot."""
    define(
        flags.DEFINE_string,
        "calibration_file",
        None,
        "All but rtn: plain text, or JSONL or Parquet with a text, prompt or messages; or owner/name/FILE of a data set"
        " on the hub.",
    )
    define(
        flags.DEFINE_integer,
        "calibration_samples",
        None,
        "All but rtn: windows of the text (unset: up to 128, as many as there are).",
        lower_bound=1,
    )
    define(
        flags.DEFINE_integer,
        "calibration_length",
        None,
        "All but rtn: tokens a window (unset: 2048, or what the model was made for if that is less).",
        lower_bound=1,
    )
    define(
        flags.DEFINE_bool,
        "strict",
        False,
        "All but rtn: a weight that cannot be done, or scaled, is an error, and not just rounded and reported.",
    )


def _define_scaling() -> None:
    """What happens to inputs before anything is rounded."""
    define(
        flags.DEFINE_enum,
        "scale_inputs",
        Scaling.NONE.value,
        [scaling.value for scaling in Scaling],
        "gptq: how inputs of linear layers are scaled before, by scales that are taken out of what comes before them."
        " awq: so that rounding to nearest would change least. smoothquant: so that they are even.",
    )
    define(
        flags.DEFINE_float,
        "smoothing",
        None,
        "smoothquant: how much of the unevenness of inputs goes into the weights, from 0 to 1 (unset: 0.5).",
    )


def _define_gptq() -> None:
    """How it rounds."""
    define(flags.DEFINE_bool, "gptq_act_order", False, "gptq: round the rows with the largest inputs first.")
    define(
        flags.DEFINE_bool,
        "gptq_static_groups",
        None,
        "gptq: take the scales of blocks from the weights as they were (unset: with --gptq_act_order, where they must"
        " be).",
    )
    define(
        flags.DEFINE_float,
        "gptq_damping",
        None,
        "gptq: added to the diagonal of the inputs' second moment, in units of its mean (unset: 0.01).",
    )
    define(
        flags.DEFINE_integer,
        "gptq_sweeps",
        0,
        "gptq: how often all scales and integers are gone over again once they are there; 4 is plenty.",
        lower_bound=0,
    )


def convert_config() -> ConvertConfig:
    """From `define_convert`."""
    if FLAGS.output_checkpoint_dir is None and not FLAGS.dry_run:
        raise ValueError("--output_checkpoint_dir is not set; expected a folder to write that does not exist")
    source = ModelSource(
        checkpoint_path=FLAGS.input_checkpoint_dir,
        quantize_type=quantize_type(),
        block_size=FLAGS.block_size,
        symmetric=FLAGS.symmetric,
        quantize_recipe=path_of(FLAGS.quantize_recipe),
        cache_dir=cache_dir(),
    )
    return ConvertConfig(
        source=source,
        output=None if FLAGS.dry_run else path_of(FLAGS.output_checkpoint_dir),
        output_format=None if FLAGS.output_format == NATIVE_FORMAT else FLAGS.output_format,
        method=method_config(),
    )


def method_config() -> MethodConfig | AutoConfig:
    """From `define_method`."""
    method = FLAGS.quantize_method
    if method != AutoConfig.NAME:
        _refuse(("target_bits",), AutoConfig.NAME)
    smoothing = SMOOTHING if FLAGS.smoothing is None else FLAGS.smoothing
    if SmoothQuantConfig.NAME not in (method, FLAGS.scale_inputs):
        _refuse(("smoothing",), SmoothQuantConfig.NAME)
    if method == RTNConfig.NAME:
        _refuse(CALIBRATION_FLAGS, "gptq, awq, smoothquant or auto")
        _refuse(GPTQ_FLAGS, "gptq")
        return RTNConfig(clip=Clip(FLAGS.clip))
    if FLAGS.calibration_file is None:
        raise ValueError(f"--calibration_file is not set; --quantize_method={method} takes a text of the model's kind")
    calibration = CalibrationConfig(
        file=path_of(FLAGS.calibration_file), samples=FLAGS.calibration_samples, length=FLAGS.calibration_length
    )
    if method != GPTQConfig.NAME:
        _refuse(GPTQ_FLAGS, GPTQConfig.NAME)
    if method == AutoConfig.NAME:
        return _auto_config(calibration)
    if method == AWQConfig.NAME:
        return AWQConfig(calibration=calibration, clip=Clip(FLAGS.clip), strict=FLAGS.strict)
    if method == SmoothQuantConfig.NAME:
        return SmoothQuantConfig(
            calibration=calibration, clip=Clip(FLAGS.clip), smoothing=smoothing, strict=FLAGS.strict
        )
    if FLAGS.gptq_act_order and FLAGS.gptq_static_groups is False:
        raise ValueError("--gptq_static_groups=False contradicts --gptq_act_order; drop one of the two")
    return GPTQConfig(
        calibration=calibration,
        clip=Clip(FLAGS.clip),
        scaling=Scaling(FLAGS.scale_inputs),
        smoothing=smoothing,
        act_order=FLAGS.gptq_act_order,
        static_groups=bool(FLAGS.gptq_static_groups),
        damping=GPTQConfig.damping if FLAGS.gptq_damping is None else FLAGS.gptq_damping,
        sweeps=FLAGS.gptq_sweeps,
        strict=FLAGS.strict,
    )


def _auto_config(calibration: CalibrationConfig) -> AutoConfig:
    for name in ("quantize_weights", "quantize_type", "block_size", "symmetric", "quantize_recipe", "clip"):
        if FLAGS[name].present:
            raise ValueError(f"--{name} contradicts --quantize_method=auto, which chooses it; drop one of the two")
    if FLAGS.target_bits is None:
        raise ValueError(
            "--target_bits is not set; --quantize_method=auto takes the bits a weight may have, such as 4.25"
        )
    method = GPTQConfig(calibration=calibration, clip=Clip.MSE, act_order=True, sweeps=AUTO_SWEEPS, strict=FLAGS.strict)
    return AutoConfig(target_bits=FLAGS.target_bits, method=method)


def _refuse(names: tuple[str, ...], methods: str) -> None:
    """Refuses flags that belong to other methods than the one that is asked for."""
    for name in names:
        if FLAGS[name].present:
            raise ValueError(
                f"--{name} belongs to --quantize_method={methods}, but the method is {FLAGS.quantize_method}; drop one"
                " of the two"
            )
