"""Building the C++ kernels, by a compiler that makes nothing: once, whole or not at all, and found again."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from jetserve import making
from jetserve.kernels.native import builder

WORKS = """#!/bin/sh
case " $* " in *" --version "*) echo "{version}"; exit;; esac
case " $* " in *" -shared "*) echo linked >> "$0.builds";; esac
while [ "$1" != -o ]; do shift; done
printf '{version}' > "$2"
"""
FAILS = """#!/bin/sh
if [ "$1" = --version ]; then echo "fails 1"; exit; fi
printf '1\\n2\\n3\\n4\\n5\\n6\\nboom\\n' >&2
exit 3
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that compilers are looked for in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def install(programs: Path) -> Callable[..., Path]:
    def install(name: str = "c++", script: str = WORKS, version: str = "works 1") -> Path:
        program = programs / name
        program.write_text(script.replace("{version}", version))
        program.chmod(0o755)
        return program

    return install


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def builds(program: Path) -> int:
    """How many libraries a compiler has made."""
    record = Path(f"{program}.builds")
    return len(record.read_text().splitlines()) if record.exists() else 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_build_is_kept_and_leaves_nothing_else(install: Callable[..., Path], folder: Path) -> None:
    program = install()
    first = builder.build(folder)
    assert builder.build(folder) == first
    assert builds(program) == 1
    assert names(folder) == {first.name, making.LOCK}


def test_another_version_or_other_flags_are_another_library(install: Callable[..., Path], folder: Path) -> None:
    install()
    paths = {builder.build(folder), builder.build(folder, extra_flags=("-DX",))}
    install(version="works 2")
    paths.add(builder.build(folder))
    assert len(paths) == 3


@pytest.mark.parametrize("contents", [b"", b"text", b"work"], ids=["empty", "other", "cut short"])
def test_a_damaged_library_is_built_again(
    contents: bytes, install: Callable[..., Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = install()
    path = builder.build(folder)
    whole = path.read_bytes()
    path.write_bytes(contents)
    with caplog.at_level(logging.WARNING, logger=builder.__name__):
        assert builder.build(folder).read_bytes() == whole
    assert builds(program) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is damaged, so the kernels for CPUs are built again"
    ]


@pytest.mark.parametrize("script", [None, FAILS], ids=["no compiler", "one that fails"])
def test_a_library_that_was_built_elsewhere_is_used(
    script: str | None, install: Callable[..., Path], folder: Path
) -> None:
    program = install()
    path = builder.build(folder)
    program.unlink()
    if script is not None:
        install(script=script)
    assert builder.build(folder) == path
    path.write_bytes(b"")
    with pytest.raises(builder.BuildError, match=rf"{path.name} is damaged"):
        builder.build(folder)


def test_a_build_that_fails_says_why_and_leaves_nothing(install: Callable[..., Path], folder: Path) -> None:
    program = install(script=FAILS)
    with pytest.raises(builder.BuildError) as raised:
        builder.build(folder)
    assert str(raised.value) == f"{program} failed with status 3: 3\n4\n5\n6\nboom"
    assert names(folder) == {making.LOCK}


def test_without_a_compiler_the_error_names_what_to_install(programs: Path, folder: Path) -> None:
    with pytest.raises(builder.BuildError, match=r"no C\+\+ compiler .* CXX names. Install g\+\+"):
        builder.build(folder)


@pytest.mark.parametrize("script", ["\x7f no program", FAILS, "#!/bin/sh\nexit 1"])
def test_where_one_compiler_is_broken_the_next_is_tried(
    script: str, install: Callable[..., Path], folder: Path
) -> None:
    install("c++", script)
    other = install("clang++")
    builder.build(folder)
    assert builds(other) == 1


def test_compilers_that_are_no_programs_are_named(install: Callable[..., Path], folder: Path) -> None:
    program = install(script="\x7f no program")
    with pytest.raises(builder.BuildError, match=rf"{program.name.replace('+', '.')} cannot be run.*Install"):
        builder.build(folder)


def test_a_compiler_may_keep_its_version_to_itself(install: Callable[..., Path], folder: Path) -> None:
    install(version="")
    assert builder.build(folder).exists()


def test_cxx_names_the_compiler(install: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = install(), install("other")
    monkeypatch.setenv("CXX", f"{other} -option")
    assert builder.compiler().command == (str(other), "-option")
    monkeypatch.setenv("CXX", str(other))
    builder.build(folder)
    assert (builds(usual), builds(other)) == (0, 1)


def test_a_compiler_that_cxx_names_and_is_not_there_is_told(
    install: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(builder.BuildError, match="/no/compiler cannot be run: No such file"):
        builder.build(folder)


def test_what_another_process_built_meanwhile_is_used(
    install: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = install()
    find = builder._find
    looks: list[Path | None] = []

    def find_and_be_late(*args: object) -> Path | None:
        looks.append(find(*args))
        if len(looks) == 1:
            builder.build(folder)
        return looks[0]

    monkeypatch.setattr(builder, "_find", find_and_be_late)
    assert builder.build(folder).exists()
    assert builds(program) == 1


def test_the_oldest_libraries_go(install: Callable[..., Path], folder: Path) -> None:
    install()
    paths = [builder.build(folder, extra_flags=(f"-D{i}",)) for i in range(builder.KEPT + 2)]
    assert names(folder) == {making.LOCK, *(path.name for path in paths[2:])}
