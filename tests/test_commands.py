"""The four commands from outside: help, errors without tracebacks, exit codes, and the installed package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jetserve.testing import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("convert_checkpoints.py", "run_server.py", "run_interactive.py", "run_offline.py")


def run(*command: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def flags_of(*command: str) -> set[str]:
    return set(re.findall(r"^  --(?:\[no\])?(\w+):", run(*command, "--help").stdout, re.MULTILINE))


@pytest.mark.slow
def test_every_flag_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "flags.md").read_text()
    modules = (flags_of("-m", f"jetserve.{name}") for name in ("loadtest", "evaluate"))
    flags = set().union(*(flags_of(script) for script in SCRIPTS), *modules)
    assert {"quantize_type", "batch_size", "task", "system", "output_checkpoint_dir", "goal_ttft_ms"} <= flags
    assert [name for name in sorted(flags) if f"--{name}" not in text] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["run_offline.py", "surplus"], ["surplus", "expected flags"]),
        (["run_offline.py", "--task=benchmark", "--prompts_file=x"], ["--prompts_file", "generate", "benchmark"]),
        (["run_offline.py", "--task=perplexity", "--temperature=1"], ["--temperature", "perplexity"]),
        (["run_offline.py", "--quantize_weights=False", "--quantize_type=int4_blockwise"], ["contradicts"]),
        (["run_interactive.py", "--checkpoint_path=/no/such"], ["/no/such", "does not exist", "hub id"]),
        (["convert_checkpoints.py"], ["--output_checkpoint_dir"]),
        (["convert_checkpoints.py", "--dry_run", "--gptq_act_order"], ["--gptq_act_order", "method is rtn"]),
        (["convert_checkpoints.py", "--dry_run", "--quantize_method=gptq"], ["--calibration_file is not set"]),
        (
            [
                "convert_checkpoints.py",
                "--dry_run",
                "--quantize_method=awq",
                "--calibration_file=x",
                "--scale_inputs=awq",
            ],
            ["--scale_inputs belongs to --quantize_method=gptq, but the method is awq"],
        ),
        (
            ["convert_checkpoints.py", "--dry_run", "--quantize_method=auto", "--calibration_file=x"],
            ["--target_bits is not set"],
        ),
        (["convert_checkpoints.py", "--dry_run", "--quantize_recipe=/no/such.yaml"], ["/no/such.yaml"]),
        (["-m", "jetserve.evaluate"], ["neither text_file nor tasks"]),
        (["-m", "jetserve.evaluate", "--tasks=a", "--plot=p.png"], ["--plot takes a --text_file"]),
        (
            ["-m", "jetserve.evaluate", "--tasks=a", "--model=keep", "--block_size=64"],
            ["--block_size contradicts --model"],
        ),
        (["run_server.py", "--tls_cert_file=x"], ["tls_cert_file", "belong together"]),
        (["run_server.py", "--checkpoint_path=/no/such", "--grpc_port=0"], ["/no/such", "does not exist"]),
        (["run_server.py", "--process_id=1"], ["--coordinator_address, --num_processes is missing"]),
    ],
    ids=lambda value: " ".join(value) if "." in " ".join(value) else "",
)
def test_errors_name_what_is_wrong_and_show_no_traceback(command: list[str], words: list[str]) -> None:
    result = run(*command)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_a_flag_out_of_its_range_is_refused() -> None:
    result = run("run_offline.py", "--batch_size=0")
    assert result.returncode == 1
    assert "--batch_size" in result.stderr
    assert "0 is not a positive integer" in result.stderr


def test_an_unknown_flag_is_refused() -> None:
    result = run("run_offline.py", "--quantise_type=int8_per_channel")
    assert result.returncode != 0
    assert "quantise_type" in result.stderr
    assert "quantize_type" in result.stderr  # the one that was meant


def test_module_without_a_command_lists_them() -> None:
    result = run("-m", "jetserve")
    assert result.returncode == 2
    for name in ("convert", "serve", "chat", "offline", "evaluate"):
        assert name in result.stderr


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    """Builds the wheel, installs it alone beside this environment's libraries, and runs the commands from it."""
    assert run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    assert run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel).returncode == 0
    assert (site / "jetserve" / "server" / "static" / "chat.html").exists()
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny")
    prompts, answers, converted = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "converted"
    prompts.write_text('{"prompt": "hello", "max_tokens": 4}\n')
    # Isolated from the source tree: the folder is not ROOT, and the wheel's package comes first.
    where = run("-c", "import jetserve; print(jetserve.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert where.stdout.startswith(str(site))
    convert = ["-m", "jetserve", "convert", f"--input_checkpoint_dir={checkpoint}", "--quantize_type=int4_blockwise"]
    result = run(*convert, f"--output_checkpoint_dir={converted}", cwd=tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    offline = ["-m", "jetserve", "offline", f"--checkpoint_path={converted}", "--max_cache_length=64"]
    files = [f"--prompts_file={prompts}", f"--output_file={answers}"]
    result = run(*offline, *files, cwd=tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["failed"] == 0
    assert json.loads(answers.read_text())["usage"]["output_tokens"] <= 4
