"""The command line: exit codes, one message for each failure, one object on stdout with --json, no prompts unasked."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from convert.gguf_file import MetadataEntry, TensorEntry, ValueType, lay_out
from kimi_gguf import api
from kimi_gguf.cli import VERBS, run
from kimi_gguf.console import Console
from kimi_gguf.console_steps import StatusLine
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from quant.recipes import RECIPES
from quant.types import QuantType

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), TinyShape(), seed=5)


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def child(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kimi_gguf", *map(str, arguments)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False, **options)


def test_help_names_every_verb_without_loading_them() -> None:
    code = (
        "import sys; from kimi_gguf.cli import run; run(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('numpy', 'gguf', 'convert.pipeline')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False)
    assert result.returncode == 0
    assert all(name in result.stdout for name in VERBS)


def test_every_verb_loads_and_has_help(verb: Any) -> None:
    for name in VERBS:
        code, out, _ = verb(name, "--help")
        assert code == 0 and "Usage: kimi-gguf " + name in out


def test_every_verb_has_help_without_torch_and_those_that_need_it_say_so(checkpoint: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from kimi_gguf.cli import VERBS, run; "
        "found = [run([verb, '--help']) for verb in VERBS]; "
        "sys.exit(any(found) or run(['imatrix', sys.argv[1], '--text', 'config.json', '--json']) - 1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(checkpoint)]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout.splitlines()[-1])["error"] == "this verb needs torch, which is not installed"


def test_the_table_of_a_released_shape_is_one_object(verb: Any) -> None:
    code, out, err = verb("plan", "--shape", "k3.1-pro", "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["shape"] == {"name": "k3.1-pro", "source_tensors": 497_340, "source_bytes": 1_561_217_377_280}
    sizes = {row["quant"]: row["tensor_bytes"] for row in value["plans"]}
    assert sizes["MXFP4"] == 1_561_518_856_576
    assert all(row["tensors"] == 2_693 for row in value["plans"])


def test_a_plan_in_words_has_a_row_for_each_quant(verb: Any, checkpoint: Path) -> None:
    code, out, _ = verb("plan", checkpoint, "--quant", "Q4_K_M", "--quant", "mxfp4")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["quant", "Q4_K_M", "MXFP4"]
    code, out, err = verb("plan", checkpoint, "--quant", "Q4_K_M")
    assert code == 0 and "floor of MLA absorbed" in out and "bits per weight" in err


def test_without_quant_every_recipe_is_planned_and_the_sizes_without_header_are_those_of_their_types(
    verb: Any, checkpoint: Path
) -> None:
    code, out, err = verb("plan", checkpoint, "--json")
    rows = json.loads(out)["plans"]
    assert (code, err) == (0, "")
    assert [row["quant"] for row in rows] == list(RECIPES)
    assert all(row["bytes"] > row["tensor_bytes"] == sum(t["bytes"] for t in row["types"]) for row in rows)
    assert {row["quant"] for row in rows if row["needs_imatrix"]} >= {"IQ1_S", "Q2_K_S"}


def test_a_conversion_ends_with_the_planned_bytes(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.gguf"
    code, out, err = verb("convert", checkpoint, "--quant", "Q3_K_M", "--outfile", file, "--json", "--threads", 2)
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["files"] == [str(file)]
    assert value["bytes"] == file.stat().st_size
    assert Path(value["manifest"]).is_file()
    assert len(gguf.GGUFReader(file).tensors) == value["tensors"]
    assert any("chat template" in warning for warning in value["warnings"])


def test_a_finished_file_is_not_replaced_unasked(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    flags = ("convert", checkpoint, "--quant", "MXFP4", "--outdir", tmp_path)
    code, out, err = verb(*flags, "-q")
    assert code == 0 and out.strip() == str(tmp_path / "Kimi-K3.1-Pro-MXFP4.gguf")
    assert all(line.startswith("warning: ") for line in err.splitlines())
    code, out, _ = verb(*flags, "--json")
    value = json.loads(out)
    assert code == 1 and "exists" in value["error"] and "--overwrite" in value["hint"]
    code, out, _ = verb(*flags, "--overwrite")
    assert code == 0 and "MXFP4" in out


def test_a_dry_run_writes_nothing(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "none"
    code, out, _ = verb("convert", checkpoint, "--quant", "Q2_K", "--outdir", target, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["plans"][0]["quant"] == "Q2_K"
    assert not target.exists()


def test_without_src_the_current_folder_is_meant(
    verb: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    code, out, _ = verb("plan", "--quant", "MXFP4", "--json")
    assert code == 0 and json.loads(out)["plans"][0]["architecture"] == "kimi-k31"
    monkeypatch.chdir(tmp_path)
    for arguments in (("plan",), ("convert", "--quant", "MXFP4"), ("plan", "no/such/deep/folder")):
        code, out, err = verb(*arguments)
        assert (code, out) == (2, "")
        assert "kimi-gguf convert FOLDER --quant MXFP4" in err


USAGE = {
    "unknown verb": ("frobnicate",),
    "unknown flag": ("plan", "--frobnicate"),
    "missing quant": ("convert", "."),
    "unknown quant": ("plan", "--shape", "k3", "--quant", "Q9_Z"),
    "unknown shape": ("plan", "--shape", "k9"),
    "both outputs": ("plan", "--shape", "k3", "--outfile", "a.gguf", "--outdir", "b"),
    "size": ("plan", "--shape", "k3", "--split-max-size", "48Q"),
    "override": ("plan", "--shape", "k3", "--override-kv", "a=b"),
    "tensor type": ("plan", "--shape", "k3", "--tensor-type", "x=Q99"),
    "floor": ("plan", "--shape", "k3", "--quant", "Q4_K_M", "--tensor-type", "ssm_beta=Q2_K"),
    "encoder": ("plan", "--shape", "k3", "--encoder", "best"),
    "seed": ("verify", "x.gguf", "--source", "x", "--seed", "-1"),
    "threads of ggml": ("serve", "x.gguf", "--threads", "513"),
    "threads of a worker": ("cluster", "worker", "--threads", "513"),
    "no baseline": ("eval", "x.gguf"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_use_exits_with_2_and_one_message(case: str, verb: Any) -> None:
    code, out, err = verb(*USAGE[case])
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err
    code, out, err = verb(*USAGE[case], "--json")
    value = json.loads(out)
    assert (code, err) == (2, "") and value["exit_code"] == 2 and value["error"]


def test_more_threads_than_make_sense_are_refused(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = verb("convert", checkpoint, "--quant", "MXFP4", "--outdir", tmp_path, "--threads", 99_999_999)
    assert code == 2 and "99999999 threads are too many" in err and not list(tmp_path.iterdir())


def test_eval_is_called_as_its_user_calls_it(verb: Any) -> None:
    assert "Usage: kimi-gguf eval [OPTIONS] MODEL" in verb("eval", "--help")[1]
    assert "try: kimi-gguf eval --help" in verb("eval")[2]


def test_no_arguments_show_the_help_and_exit_with_2(verb: Any) -> None:
    code, out, err = verb()
    assert (code, out) == (2, "") and "convert" in err


def test_a_faulty_gguf_is_one_message_with_exit_1(verb: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    code, out, err = verb("inspect", path)
    assert (code, out) == (1, "") and err.startswith("error: ") and "Traceback" not in err
    code, out, err = verb("inspect", path, "--json")
    assert (code, err) == (1, "") and "bad.gguf" in json.loads(out)["error"]


def test_inspection_shows_sizes_and_structure(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    verb("convert", checkpoint, "--quant", "MXFP4", "--outdir", tmp_path, "--split-max-size", "4M")
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    values = []
    for file in (files[0], files[-1]):
        code, out, _ = verb("inspect", file, "--json", "--tensors")
        values.append(json.loads(out))
        assert code == 0
    assert values[0] == values[1]
    value = values[0]
    assert value["structure"] == {"checked": True, "faults": [], "warnings": []}
    assert value["expert_bits_per_weight"] == 4.25
    assert value["bytes"] == sum(file.stat().st_size for file in files)
    assert len(value["tensor_list"]) == value["tensors"]
    assert value["metadata"]["kimi-k31.attention.layer_norm_rms_epsilon"] == 1e-5
    code, out, _ = verb("inspect", files[1], "--tensors")
    assert code == 0 and "structure: complete" in out and "blk.3.indexer.k_norm.bias" in out
    files[2].unlink()
    code, _, err = verb("inspect", files[0])
    assert code == 1 and files[2].name in err


def test_a_structural_fault_exits_with_1_and_still_shows_the_file(verb: Any, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    layout = lay_out([MetadataEntry("general.architecture", ValueType.STRING, "kimi-k3")], [])
    path.write_bytes(layout.header)
    code, out, err = verb("inspect", path)
    assert code == 1 and "faults" in out and "kimi-k3.block_count is missing" in err


def test_what_a_terminal_would_obey_is_written_out(verb: Any, tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    keys = [MetadataEntry("general.name", ValueType.STRING, "\x1b]0;owned\x07\u202eevil\r")]
    layout = lay_out(keys, [TensorEntry("t\x1b[2J", (32,), QuantType.F32)])
    path.write_bytes(layout.header.ljust(layout.nbytes, b"\0"))
    code, out, err = verb("inspect", path, "--tensors")
    assert code == 0
    assert not set("\x1b\x07\r\u202e") & set(out + err)
    assert "\\x1b]0;owned" in out and "t\\x1b[2J" in out


def test_ctrl_c_exits_with_130(verb: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "convert", interrupted)
    code, out, err = verb("convert", checkpoint, "--quant", "MXFP4")
    assert (code, out) == (130, "") and "the same command continues" in err
    code, out, _ = verb("convert", checkpoint, "--quant", "MXFP4", "--json")
    assert code == 130 and json.loads(out)["error"] == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_ended_is_an_interrupt_too(number: signal.Signals, checkpoint: Path) -> None:
    code = (
        "import signal, sys, time; from kimi_gguf import api, cli; "
        "signal.signal(int(sys.argv[2]), signal.SIG_DFL); "  # a shell may have had it ignored
        "api.convert = lambda *_, **__: (sys.stdout.write('works\\n'), sys.stdout.flush(), time.sleep(60)); "
        "cli.main(['convert', sys.argv[1], '--quant', 'MXFP4'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoint), str(int(number))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "works\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "error: interrupted\n" in err and "the same command continues" in err and "Traceback" not in err


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from kimi_gguf import cli; "
        "cli._end_politely(); sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_an_interrupt_while_modules_are_loaded_is_one_line() -> None:
    code = """
import runpy, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
runpy.run_module("kimi_gguf", run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_a_result_that_cannot_be_written_is_told_on_stderr(checkpoint: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for flags in ((), ("--json",)):
        for source, expected in ((str(checkpoint), 1), ("no such folder", 2 if not flags else 1)):
            command = [sys.executable, "-m", "kimi_gguf", "plan", source, "--quant", "MXFP4", *flags]
            with Path("/dev/full").open("w") as full:
                done = subprocess.run(
                    command, env=environment, text=True, stdout=full, stderr=subprocess.PIPE, check=False
                )
            assert done.returncode == expected and "Traceback" not in done.stderr
            assert ("standard output: No space left on device" in done.stderr) == (expected == 1)


def test_messages_that_cannot_be_written_do_not_end_a_conversion(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.gguf"
    command = [
        sys.executable,
        "-m",
        "kimi_gguf",
        "convert",
        str(checkpoint),
        "--quant",
        "MXFP4",
        "--outfile",
        str(file),
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=full,
            check=False,
        )
    assert done.returncode == 0 and str(file) in done.stdout
    assert api.inspect(file).faults == ()


@pytest.mark.parametrize("arguments", [("runtime", "info"), ("export", "lmstudio", "MODEL"), ("cluster", "worker")])
def test_a_user_without_a_home_is_told_what_to_set(
    arguments: tuple[str, ...], verb: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    verb("convert", checkpoint, "--quant", "MXFP4", "--outfile", tmp_path / "m.gguf")
    for name in ("KIMI_GGUF_CACHE", "KIMI_GGUF_RUNTIME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    code, _, err = verb(*(tmp_path / "m.gguf" if word == "MODEL" else word for word in arguments))
    assert code == 2 and "HOME is not set" in err and "set HOME" in err


class Gone(io.StringIO):
    """A terminal that was closed while a program went on."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    console = Console()
    with console.stages() as bar, StatusLine(console) as line:
        bar.begin("work", 3)
        for step in range(4):
            bar.step(step, "step")
            line.status("works")
        line.note("done")


def test_an_unforeseen_failure_is_one_line_too(verb: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(api, "plan", broken)
    code, out, err = verb("plan", checkpoint)
    assert (code, out) == (1, "") and "RuntimeError: boom" in err and "Traceback" not in err


def test_a_path_that_the_system_refuses_is_named(verb: Any, checkpoint: Path, tmp_path: Path) -> None:
    for arguments in (("n" * 300,), (checkpoint, "--outdir", tmp_path / ("n" * 300))):
        code, out, err = verb("convert", *arguments, "--quant", "MXFP4")
        assert (code, out) == (1, "") and "nnn: File name too long" in err and "unexpected" not in err


class Terminal(io.StringIO):
    """A stdin that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "yes", "code"), [("n\n", (), 1), ("", (), 1), ("y\n", (), 0), ("n\n", ("--yes",), 0)]
)
def test_growth_is_asked_about_on_a_terminal_only(
    answer: str, yes: tuple[str, ...], code: int, verb: Any, checkpoint: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    found, _, err = verb("convert", checkpoint, "--quant", "Q5_0", "--outdir", tmp_path / "out", *yes)
    assert found == code
    assert ("Continue?" in err) == (not yes)
    assert (tmp_path / "out").exists() == (code == 0)


def test_a_closed_stdin_and_a_reader_that_left_do_no_harm(checkpoint: Path, tmp_path: Path) -> None:
    flags = ("convert", checkpoint, "--quant", "Q5_0", "--outdir", tmp_path, "-q")
    done = child(*flags, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "Continue?" not in done.stderr
    read, write = os.pipe()
    os.close(read)
    left = subprocess.run(
        [sys.executable, "-m", "kimi_gguf", "plan", "--shape", "k3", "--quant", "MXFP4"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert left.returncode == 1 and left.stderr == ""


def test_closed_streams_do_no_harm(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; [os.close(fd) for fd in (0, 1, 2)]; "
        "os.execv(sys.executable, [sys.executable, '-m', 'kimi_gguf', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", code, "convert", str(checkpoint), "--quant", "MXFP4", "--outdir", str(tmp_path)]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0
    assert api.inspect(next(tmp_path.glob("*.gguf"))).sizes.total.nbytes


def test_version_and_module_entry() -> None:
    result = child("--version")
    assert result.returncode == 0 and result.stdout.startswith("kimi-gguf ")


def test_the_demonstration_runs_twice_in_its_folder_and_in_no_other(verb: Any, tmp_path: Path) -> None:
    home = tmp_path / "demo"
    code, out, _ = verb("demo", "--dir", home, "--json")
    value = json.loads(out)
    assert code == 0
    assert value["predicted_bytes"] == value["actual_bytes"] == Path(value["file"]).stat().st_size
    assert value["inspection"]["structure"]["faults"] == []
    code, out, _ = verb("demo", "--dir", home)
    assert code == 0 and "predicted" in out and ": equal" in out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    code, _, err = verb("demo", "--dir", tmp_path / "mine")
    assert code == 2 and "choose another --dir" in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["precious"]
