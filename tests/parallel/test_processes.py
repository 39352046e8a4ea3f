"""Several processes that run one model together."""

import subprocess
import sys
from pathlib import Path

import pytest
from many_devices import environment_of_devices, free_port

from jetserve.config import ProcessesConfig
from jetserve.quantize.qarray import QUANTIZE_TYPES


@pytest.mark.slow
def test_two_processes_answer_as_one_device(tmp_path: Path) -> None:
    """With four devices each, and fewer KV heads than there are devices."""
    command = [sys.executable, str(Path(__file__).with_name("two_processes.py")), f"127.0.0.1:{free_port()}"]
    tests = str(Path(__file__).parents[1])
    started = [
        subprocess.Popen(
            [*command, str(number), str(tmp_path / "model")],
            env={**environment_of_devices(4), "PYTHONPATH": f"{tests}:{Path(tests).parent}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        # Both write little, so neither waits for its pipe to be read.
        texts = [process.communicate(timeout=1800)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], texts[0][-6000:] + texts[1][-6000:]
    assert [line for line in texts[0].splitlines() if line.startswith("the same")] == [
        f"the same: {name}" for name in QUANTIZE_TYPES
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"coordinator_address": "host"}, "coordinator_address is 'host'; expected HOST:PORT"),
        ({"coordinator_address": "host:0"}, "expected HOST:PORT"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"process_id": 2}, "process_id is 2; expected 0 to 1"),
    ],
)
def test_bad_settings_are_refused(changed: dict, message: str) -> None:
    settings = {"coordinator_address": "host:1234", "num_processes": 2, "process_id": 0}
    with pytest.raises(ValueError, match=message):
        ProcessesConfig(**settings | changed)
