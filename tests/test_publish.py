"""Publishing on the test Hub: layout, card, proof, and what happens when the link, the Hub or the client fails."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_environment import ENDPOINT, free_port
from hub_samples import start_client, start_server, wait_for
from hub_server import TOKEN, HubServer, Kind
from hub_store import HubStore, sha256_of
from huggingface_hub import constants
from report_samples import make_report

from kimi_gguf import convert, inspect, publish_model
from kimi_gguf.cli import run
from kimi_gguf.hub import retry
from kimi_gguf.publish import target
from kimi_gguf.publish.facts import DIMENSIONS
from kimi_gguf.publish.lock import upload_lock
from kimi_gguf.publish.regions import merge_regions
from kimi_gguf.reference.checkpoint_maker import TinyShape, make_checkpoint
from kimi_gguf.sizes import human_bytes
from quant.errors import BelowBar, InputError, OutputError, UsageError
from quant.imatrix_file import write_gguf

REPO = "tester/Kimi-GGUF"
CARD = b"---\nlicense: other\nlicense_name: kimi\nlicense_link: LICENSE\nlanguage: en\n---\n"
STEM = "Kimi-K3.1-Pro-MXFP4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As released but small, with a model card; read only."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "Kimi", TinyShape(layers=4, experts=6))
    (folder / "README.md").write_bytes(CARD)
    return folder


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one quant in several files; read only."""
    folder = tmp_path_factory.mktemp("made")
    convert(checkpoint, quant="MXFP4", outdir=folder, split_max_size="2M", threads=2)
    return folder


@pytest.fixture(scope="module")
def other(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another quant, in one file; read only."""
    folder = tmp_path_factory.mktemp("other")
    convert(checkpoint, quant="Q4_K_M", outdir=folder, threads=2)
    return folder


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KIMI_GGUF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.002)


def files_of(hub: HubServer, revision: str = "main") -> dict[str, str]:
    """SHA-256 of what a branch holds, by path."""
    return {path: entry["object"] for path, entry in hub.store.resolve(REPO, revision)[1].items()}


def text_of(hub: HubServer, path: str) -> str:
    return hub.store.object(files_of(hub)[path]).read_text()


def sent(hub: HubServer) -> list[str]:
    """Hashes of the objects whose bytes were sent."""
    return [r.path.removeprefix("/upload/") for r in hub.requests if r.path.startswith("/upload/")]


def commits(hub: HubServer) -> int:
    return len(hub.store.history(REPO, "main"))


def ggufs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def write_report(path: Path, folder: Path, **changes: Any) -> Path:
    """An eval report about the files of a folder."""
    hashes = {p.name: sha256_of(p) for p in ggufs(folder)}
    report = replace(make_report(), model_files=hashes, bars={"--max-kld": 0.01})
    path.write_text(json.dumps(report.to_dict() | changes))
    return path


def test_a_quant_goes_where_people_look_for_it(hub: HubServer, made: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "any.json", made)
    matrix = tmp_path / "matrix.gguf"
    write_gguf(
        matrix,
        {"blk.1.ffn_gate_exps.weight": (np.ones((1, 256), np.float32), np.ones(1, np.float32))},
        ["text"],
        1,
        512,
    )
    result = publish_model([made, report, matrix], REPO, create=True, private=True)
    held = files_of(hub)
    names = {f"MXFP4/{p.name}": sha256_of(p) for p in ggufs(made)}
    assert len(names) > 1 and {p: h for p, h in held.items() if p in names} == names
    assert held.keys() - names.keys() == {
        "README.md",
        "imatrix.gguf",
        f"MXFP4/{STEM}.gguf.manifest.json",
        f"MXFP4/{STEM}.eval.json",
    }
    assert hub.store.load(REPO)["private"]
    assert result.commit == hub.store.load(REPO)["refs"]["main"]
    manifest = json.loads(text_of(hub, f"MXFP4/{STEM}.gguf.manifest.json"))
    assert {s["name"]: s["digest"]["sha256"] for s in manifest["subject"]} == {p[6:]: h for p, h in names.items()}
    assert str(made.parent) not in json.dumps(manifest) and manifest["source"]["origin"] is None
    assert len(inspect(f"hf://{REPO}/MXFP4").files) == len(names)


def test_the_card_says_what_manifest_and_report_say(hub: HubServer, made: Path, tmp_path: Path) -> None:
    publish_model([made, write_report(tmp_path / "r.json", made)], REPO, create=True)
    card = text_of(hub, "README.md")
    front = card.split("---\n")[1]
    for line in ("license: other", "license_name: kimi", "library_name: gguf", "quantized_by: tester", "- kimi-k31"):
        assert line in front
    report = make_report()
    assert report.output is not None and report.routing is not None
    row = next(line for line in card.splitlines() if line.startswith("| [MXFP4]"))
    assert "MXFP4 (4.25)" in row and f"{report.output.kl.value:.4g}" in row
    assert f"{100 * report.routing.overlap.value:.4g}" in row
    assert "b12180 or later" in card and f"llama-server -hf {REPO}:MXFP4" in card
    assert "kimi-gguf convert Kimi --quant MXFP4 --split-max-size 2000000 --encoder" in card
    assert f"kimi-gguf verify hf://{REPO}/MXFP4 --source" in card and "Split files" in card
    # 3 KDA layers: a state of 2 x 128 x 128 and 3 x 3 convolution inputs of 256, in float32; one MLA layer: a latent
    # of 320 and an indexer key of 64, in 16 bits.
    weights = sum(p.stat().st_size for p in ggufs(made))
    context = 3 * (2 * 128 * 128 + 3 * 3 * 256) * 4 + 4096 * (320 + 64) * 2
    assert f"| MXFP4 | {human_bytes(weights)} | {human_bytes(weights + context)} |" in card


def test_a_second_quant_joins_the_table_and_hand_written_text_stays(hub: HubServer, made: Path, other: Path) -> None:
    publish_model(made, REPO, create=True)
    card = text_of(hub, "README.md")
    end = "<!-- kimi-gguf:end quants -->"
    card = card.replace("license: other", "license: apache-2.0").replace(end, f"{end}\n\nBy hand: buy more RAM.")
    begin, finish = card.index("<!-- kimi-gguf:begin types"), card.index("<!-- kimi-gguf:end types -->") + 28
    card = card[:begin] + "No types here." + card[finish:]
    hub.store.commit(REPO, "main", "hand", {"README.md": hub.store.entry("README.md", hub.store.put(card.encode()))})
    publish_model(other, REPO)
    now = text_of(hub, "README.md")
    assert "By hand: buy more RAM." in now and "No types here." in now and "license: apache-2.0" in now
    assert "## Types by bytes" not in now
    assert "| [MXFP4](./MXFP4)" in now and "| [Q4_K_M](./Q4_K_M)" in now
    before = commits(hub)
    publish_model([made, other], REPO)
    assert (text_of(hub, "README.md"), commits(hub)) == (now, before)


def test_a_card_that_the_hub_will_not_take_is_found_out_before_the_upload(hub: HubServer, made: Path) -> None:
    hub.store.create(REPO)
    for text, words in (
        ("---\ntags: 5\n---\n", 'objects: "tags" must be a list of strings'),
        ("---\n: :\n---\n", "not YAML"),
    ):
        entry = hub.store.entry("README.md", hub.store.put(text.encode()))
        hub.store.commit(REPO, "main", "hand", {"README.md": entry})
        with pytest.raises(InputError, match=words):
            publish_model(made, REPO)
    assert sent(hub) == []


def test_marks_that_do_not_pair_are_refused() -> None:
    with pytest.raises(InputError, match="region quants do not pair up"):
        merge_regions("<!-- kimi-gguf:begin quants -->\ntext", {"quants": "new"})
    assert merge_regions("mine", {"a": "x"}).startswith("mine\n\n<!-- kimi-gguf:begin a -->\nx\n")


def test_a_dry_run_shows_everything_and_writes_nothing(hub: HubServer, made: Path, capsys: Any) -> None:
    assert run(["publish", str(made), REPO, "--dry-run"]) == 1
    assert "--create" in capsys.readouterr().err
    assert run(["publish", str(made), REPO, "--create", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "(to be created)" in shown and f"MXFP4/{ggufs(made)[0].name}" in shown and "## Quants" in shown
    assert not list((hub.store.root / "repos").iterdir()) and sent(hub) == []
    publish_model(made, REPO, create=True)
    assert run(["publish", str(made), REPO, "--dry-run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {f["state"] for f in value["files"]} == {"there"} and value["upload_bytes"] == 0


def test_private_is_never_published_for_all_to_see(hub: HubServer, checkpoint: Path, made: Path) -> None:
    with pytest.raises(UsageError, match="--private is about a repository that is made"):
        publish_model(made, REPO, private=True)
    hub.store.create(REPO)
    for dry_run in (True, False):
        with pytest.raises(InputError, match="is there and is public"):
            publish_model(made, REPO, create=True, private=True, dry_run=dry_run)
        with pytest.raises(InputError, match="is there and is public"):
            convert(checkpoint, quant="MXFP4", outdir=made, publish=REPO, create=True, private=True, as_you_go=dry_run)
    assert sent(hub) == []


def test_a_branch_of_its_own(hub: HubServer, made: Path) -> None:
    with pytest.raises(InputError, match="Repository not found"):
        publish_model(made, REPO, revision="next")
    publish_model(made, REPO, revision="next", create=True)
    assert f"MXFP4/{ggufs(made)[0].name}" in files_of(hub, "next") and files_of(hub) == {}
    with pytest.raises(InputError, match="Invalid rev id"):
        publish_model(made, f"hf://{REPO}@third")
    assert not publish_model(made, f"hf://{REPO}@third", create=True, dry_run=True).exists
    publish_model(made, f"hf://{REPO}@third", create=True)
    assert f"MXFP4/{ggufs(made)[0].name}" in files_of(hub, "third")


def test_a_commit_that_timed_out_and_happened_is_not_made_again(hub: HubServer, made: Path) -> None:
    publish_model(made, REPO, create=True)
    usual = commits(hub)
    shutil.rmtree(hub.store.root)
    hub.store.__init__(hub.store.root)  # type: ignore[misc]
    hub.fault("POST .*/commit/", "late", status=504, times=2)
    notes: list[str] = []
    publish_model(made, REPO, create=True, note=notes.append)
    assert commits(hub) == usual and any("504" in note for note in notes)


def test_limits_and_broken_uploads_are_waited_for(hub: HubServer, made: Path) -> None:
    hub.fault("POST .*/preupload/", "status", status=429, headers={"Retry-After": "0"}, times=2)
    hub.fault("POST .*/commit/", "status", status=429, headers={"Retry-After": "0"})
    hub.fault("PUT /upload/", "cut", at=10_000, skip=1, times=2)
    hub.fault("POST .*/objects/batch", "drop", times=1)
    notes: list[str] = []
    publish_model(made, REPO, create=True, note=notes.append)
    assert all(files_of(hub)[f"MXFP4/{p.name}"] == sha256_of(p) for p in ggufs(made))
    assert any("429" in note for note in notes)


def test_files_go_up_in_parts_too(hub: HubServer, made: Path) -> None:
    hub.multipart = 300_000
    publish_model(made, REPO, create=True)
    assert files_of(hub)[f"MXFP4/{ggufs(made)[0].name}"] == sha256_of(ggufs(made)[0])


def test_commits_hold_no_more_files_than_the_hub_takes(
    hub: HubServer, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "MOST_FILES_PER_COMMIT", 2)
    publish_model(made, REPO, create=True)
    count = len(ggufs(made)) + 1
    assert commits(hub) == 1 + -(-count // 2) + 1


def test_a_wrong_hash_on_the_hub_is_an_error(hub: HubServer, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hub.store.entry
    wrong = hub.store.put(b"other bytes")

    def entry(path: str, name: str, *, large: bool | None = None) -> dict[str, Any]:
        found = right(path, name, large=large)
        return found | {"object": wrong} if "-00002-of-" in path else found

    monkeypatch.setattr(hub.store, "entry", entry)
    with pytest.raises(InputError, match=f"the Hub holds {wrong}"):
        publish_model(made, REPO, create=True)


def test_a_file_that_is_not_its_manifests_is_refused_before_a_commit(
    hub: HubServer, made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made, tmp_path / "copy")
    with ggufs(folder)[1].open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        publish_model(folder, REPO, create=True)
    assert not any(path.endswith(".gguf") for path in files_of(hub))


def test_a_killed_upload_is_continued_and_nothing_is_sent_twice(hub: HubServer, made: Path, tmp_path: Path) -> None:
    hub.fault("PUT /upload/", "hang", seconds=3, skip=2)
    flags = ("publish", made, REPO, "--create")
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    wait_for(lambda: len(sent(hub)) == 3)
    client.send_signal(signal.SIGKILL)
    client.communicate()
    first = sent(hub)[:2]
    hub.requests.clear()
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    out, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert "all hashes confirmed" in out and TOKEN not in out + err
    assert not set(first) & set(sent(hub))
    assert all(files_of(hub)[f"MXFP4/{p.name}"] == sha256_of(p) for p in ggufs(made))


def test_a_killed_server_is_waited_for(made: Path, tmp_path: Path) -> None:
    port = free_port()
    hang = {"match": "PUT /upload/", "kind": "hang", "seconds": 30, "skip": 1}
    server = start_server(tmp_path / "hub", port, [hang])
    endpoint = f"http://127.0.0.1:{port}"
    client = start_client("publish", made, REPO, "--create", endpoint=endpoint, cwd=tmp_path, token=TOKEN)
    objects = tmp_path / "hub" / "objects"
    wait_for(lambda: any(objects.glob("*")))
    time.sleep(0.2)
    server.kill()
    server.wait()
    server = start_server(tmp_path / "hub", port)
    try:
        _, err = client.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert client.returncode == 0, err
    held = HubStore(tmp_path / "hub").resolve(REPO, "main")[1]
    assert all(held[f"MXFP4/{p.name}"]["object"] == sha256_of(p) for p in ggufs(made))


def test_of_two_uploads_one_waits_and_another_machines_commit_is_not_undone(
    hub: HubServer, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with upload_lock(REPO, "main"), pytest.raises(OutputError, match=r"another process .* uploads to"):
        publish_model(made, REPO, create=True)
    real = hub.store.commit
    foreign = [hub.store.entry("notes.txt", hub.store.put(b"theirs"))]

    def commit(repo: str, branch: str, *rest: Any) -> str:
        if foreign:
            real(repo, branch, "theirs", {"notes.txt": foreign.pop()})
        return real(repo, branch, *rest)

    monkeypatch.setattr(hub.store, "commit", commit)
    publish_model(made, REPO, create=True)
    assert {"notes.txt", "README.md", f"MXFP4/{ggufs(made)[0].name}"} <= files_of(hub).keys()


def test_what_another_set_of_the_same_quant_left_is_removed(
    hub: HubServer, checkpoint: Path, made: Path, tmp_path: Path
) -> None:
    publish_model([made, write_report(tmp_path / "r.json", made)], REPO, create=True)
    hub.store.commit(REPO, "main", "x", {"MXFP4/mine.gguf": hub.store.entry("mine.gguf", hub.store.put(b"GGUF"))})
    convert(checkpoint, quant="MXFP4", outdir=tmp_path / "one", threads=2)
    publish_model(tmp_path / "one", REPO)
    inside = {p for p in files_of(hub) if p.startswith("MXFP4/")}
    assert inside == {f"MXFP4/{STEM}.gguf", f"MXFP4/{STEM}.gguf.manifest.json", "MXFP4/mine.gguf"}


@pytest.mark.parametrize("case", ["missing", "no report", "damaged", "other bytes", "no hashes", "no bars", "below"])
def test_the_gate_refuses_with_code_3(
    hub: HubServer, made: Path, other: Path, tmp_path: Path, capsys: Any, case: str
) -> None:
    path = tmp_path / "report.json"
    if case == "no report":
        path.write_text("{}")
    elif case == "other bytes":
        write_report(path, other)
    elif case == "no hashes":
        write_report(path, made, model_files={})
    elif case == "damaged":
        write_report(path, made, below_bar=None)
    elif case == "no bars":
        write_report(path, made, bars={})
    elif case == "below":
        write_report(path, made, below_bar=["--max-kld 0.01: the value is 0.02"])
    assert run(["publish", str(made), REPO, "--create", "--require", str(path)]) == BelowBar.exit_code
    words = {
        "missing": "cannot be read",
        "other bytes": "other bytes than MXFP4",
        "below": "--max-kld 0.01",
        "no bars": "sets no bars",
    }
    assert words.get(case, "report") in capsys.readouterr().err
    assert not list((hub.store.root / "repos").iterdir())


def test_what_the_gate_lets_through_is_published_with_its_report(hub: HubServer, made: Path, tmp_path: Path) -> None:
    publish_model(made, REPO, create=True, require=write_report(tmp_path / "report.json", made))
    assert json.loads(text_of(hub, f"MXFP4/{STEM}.eval.json"))["model_files"]


@pytest.mark.parametrize(
    "damage",
    [{"model_files": {"a": []}}, {"output": 5}, {"routing": []}, {"tokens": "x"}, {"flags": 3}, {"baseline": "b"}],
)
def test_a_damaged_report_is_told(hub: HubServer, made: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    path = write_report(tmp_path / "r.json", made, **damage)
    with pytest.raises(InputError, match="damaged: no whole eval report"):
        publish_model([made, path], REPO, create=True)
    publish_model(made, REPO, create=True)
    entry = hub.store.entry("x.json", hub.store.put(path.read_bytes()))
    hub.store.commit(REPO, "main", "x", {f"MXFP4/{STEM}.eval.json": entry})
    publish_model(made, REPO)
    assert f"MXFP4/{STEM}.eval.json" not in files_of(hub)


def test_bottomless_json_on_the_hub_is_passed_over(hub: HubServer, made: Path) -> None:
    publish_model(made, REPO, create=True)
    entry = hub.store.entry("x.json", hub.store.put(b"[" * 100_000))
    hub.store.commit(REPO, "main", "x", {f"MXFP4/a{end}": entry for end in (".eval.json", ".gguf.manifest.json")})
    publish_model(made, REPO)
    assert "[MXFP4]" in text_of(hub, "README.md")


def test_half_a_surrogate_pair_in_a_report_spoils_no_card(hub: HubServer, made: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "r.json", made, baseline={"label": "half \ud800"})
    publish_model([made, report], REPO, create=True)
    assert "half ?" in text_of(hub, "README.md")


def test_a_report_may_come_later_and_alone(hub: HubServer, made: Path, other: Path, tmp_path: Path) -> None:
    publish_model(made, REPO, create=True)
    assert "quality is not known" in text_of(hub, "README.md")
    with pytest.raises(InputError, match="about other files"):
        publish_model(write_report(tmp_path / "r.json", other), REPO)
    publish_model(write_report(tmp_path / "r.json", made), REPO)
    assert f"MXFP4/{STEM}.eval.json" in files_of(hub) and "quality is not known" not in text_of(hub, "README.md")


def test_what_cannot_be_found_or_used_is_said(hub: HubServer, made: Path, tmp_path: Path) -> None:
    model = shutil.copytree(made, tmp_path / "m")
    (model / "x.gguf.journal").touch()
    with pytest.raises(OutputError, match="not finished"):
        publish_model(model, REPO, create=True)
    (model / "x.gguf.journal").unlink()
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="nothing to publish"):
        publish_model(tmp_path / "none", REPO)
    with pytest.raises(UsageError, match="neither a GGUF"):
        (tmp_path / "a.txt").touch()
        publish_model(tmp_path / "a.txt", REPO)
    with pytest.raises(UsageError, match="no repository"):
        publish_model(model, "nowhere")


def test_a_model_without_a_manifest_is_described_from_its_header(hub: HubServer, other: Path, tmp_path: Path) -> None:
    (source,) = ggufs(other)
    shutil.copy(source, tmp_path / source.name)
    result = publish_model(tmp_path / source.name, REPO, create=True)
    assert any("no manifest" in warning for warning in result.warnings)
    assert "Q4_K, Q6_K" in text_of(hub, "README.md") and "how it was made is not known" in text_of(hub, "README.md")
    shutil.copy(source, tmp_path / "model.gguf")
    with pytest.raises(InputError, match="does not end in -Q4_K_M"):
        publish_model(tmp_path / "model.gguf", REPO)


def test_as_you_go_each_file_has_its_commit_and_goes_when_the_hub_has_confirmed_it(
    hub: HubServer, made: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(made, tmp_path / "m")
    names = {f"MXFP4/{p.name}": sha256_of(p) for p in ggufs(folder)}
    write_report(folder / "any.json", folder)
    (folder / "README.md").write_text("mine")
    assert run(["publish", str(folder), REPO, "--create", "--as-you-go", "--dry-run"]) == 0
    assert len(ggufs(folder)) == len(names)
    left: list[int] = []
    real = hub.store.commit

    def commit(*rest: Any) -> str:
        left.append(len(ggufs(folder)))
        return real(*rest)

    monkeypatch.setattr(hub.store, "commit", commit)
    assert run(["publish", str(folder), REPO, "--create", "--as-you-go"]) == 0
    assert "published and removed" in capsys.readouterr().err
    assert {p: h for p, h in files_of(hub).items() if p in names} == names
    assert f"MXFP4/{STEM}.eval.json" in files_of(hub)
    # A file is still here while its commit is made, and gone when the next one is; then manifest and card.
    assert left[: len(names)] == list(range(len(names), 0, -1))
    assert sorted(p.name for p in folder.iterdir()) == [f"{STEM}.gguf.manifest.json", "README.md", "any.json"]
    before = commits(hub)
    publish_model(folder, REPO, as_you_go=True)
    assert commits(hub) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="offline mode is on") as offline:
        publish_model(folder, REPO, as_you_go=True)
    assert offline.value.hint == "unset HF_HUB_OFFLINE to publish"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.store.commit(REPO, "main", "lost", {}, (next(iter(names)),))
    with pytest.raises(InputError, match=r"is missing, and .* on the Hub too"):
        publish_model(folder, REPO, as_you_go=True)


def test_as_you_go_is_continued_and_keeps_what_is_not_confirmed(
    hub: HubServer, made: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(made, tmp_path / "m")
    hashes = [sha256_of(p) for p in ggufs(folder)]
    first, second, *_ = ggufs(folder)
    right = hub.store.entry
    wrong = hub.store.put(b"other bytes")

    def entry(path: str, name: str, *, large: bool | None = None) -> dict[str, Any]:
        found = right(path, name, large=large)
        return found | {"object": wrong} if path.endswith(second.name) else found

    with monkeypatch.context() as patch:
        patch.setattr(hub.store, "entry", entry)
        with pytest.raises(InputError, match=f"the Hub holds {wrong}"):
            publish_model(folder, REPO, create=True, as_you_go=True)
    assert not first.exists() and second.exists()
    with pytest.raises(InputError, match="files of the set are missing"):
        publish_model(folder, REPO)
    # What the Hub has by the manifest's word does not excuse other bytes here.
    shutil.copy(made / first.name, first)
    with first.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        publish_model(folder, REPO, as_you_go=True)
    assert first.exists() and second.exists()
    first.unlink()
    hub.requests.clear()
    publish_model(folder / first.name, REPO, as_you_go=True)
    assert not ggufs(folder) and hashes[0] not in sent(hub)
    assert [files_of(hub)[f"MXFP4/{p.name}"] for p in ggufs(made)] == hashes
    (source,) = ggufs(other)
    alone = Path(shutil.copy(source, tmp_path / source.name))
    with pytest.raises(UsageError, match="no manifest beside it"):
        publish_model(alone, REPO, as_you_go=True)
    assert alone.exists()


def test_as_you_go_killed_at_any_moment_every_file_is_here_or_on_the_hub(
    hub: HubServer, made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made, tmp_path / "m")
    names = {p.name: sha256_of(p) for p in ggufs(folder)}
    flags = ("publish", folder, REPO, "--create", "--as-you-go")
    upload, commit = "PUT /upload/", "POST .*/commit/"
    moments: list[tuple[str, Kind, int]] = [(upload, "hang", 0), (upload, "hang", 1), (commit, "hang", 0)]
    for match, kind, skip in [*moments, (commit, "late", 0)]:
        fault = hub.fault(match, kind, seconds=3, skip=skip)
        client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
        wait_for(lambda fault=fault: fault.times == 0)  # type: ignore[misc]
        client.send_signal(signal.SIGKILL)
        client.communicate()
        here = {p.name: sha256_of(p) for p in ggufs(folder)}
        there = {p.removeprefix("MXFP4/"): h for p, h in files_of(hub).items() if p.endswith(".gguf")}
        assert there | here == names
    client = start_client(*flags, endpoint=ENDPOINT, cwd=tmp_path, token=TOKEN)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert {n: files_of(hub)[f"MXFP4/{n}"] for n in names} == names and ggufs(folder) == []


@pytest.mark.parametrize("files", [5, [3], [], [{"name": "a.gguf"}], ["../", "", "/etc/x.gguf", "../x.gguf", ".."]])
def test_a_damaged_manifest_is_told_and_never_leads_out_of_its_folder(
    hub: HubServer, other: Path, tmp_path: Path, files: Any
) -> None:
    (source,) = ggufs(other)
    folder = shutil.copytree(other, tmp_path / "m")
    path = folder / f"{source.name}.manifest.json"
    document = json.loads(path.read_text())
    names = files if isinstance(files, list) and files and isinstance(files[0], str) else [None]
    for name in names:
        document["files"] = files if name is None else [document["files"][0] | {"name": name}]
        path.write_text(json.dumps(document))
        for as_you_go in (True, False):
            with pytest.raises(InputError, match="damaged or not whole"):
                publish_model(folder, REPO, create=True, as_you_go=as_you_go)
        document = json.loads((other / path.name).read_text())
    assert sent(hub) == [] and ggufs(folder)
    # The Hub's own copy of such a manifest is replaced.
    publish_model(other, REPO, create=True)
    document["files"] = files
    entry = hub.store.entry("x.json", hub.store.put(json.dumps(document).encode()))
    hub.store.commit(REPO, "main", "x", {f"Q4_K_M/{path.name}": entry})
    publish_model(other, REPO)
    assert json.loads(text_of(hub, f"Q4_K_M/{path.name}"))["files"] != files


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": []},
        {"dimensions": {"kda_heads": 1}},
        {"dimensions": dict.fromkeys(DIMENSIONS, float("inf"))},
        {"tool": 3},
        {"warnings": 5},
        {"architecture": []},
    ],
)
def test_a_manifest_that_the_card_cannot_be_made_of_is_told_here_and_passed_over_there(
    hub: HubServer, made: Path, other: Path, tmp_path: Path, damage: dict[str, Any]
) -> None:
    folder = shutil.copytree(other, tmp_path / "m")
    path = next(folder.glob("*.manifest.json"))
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | damage))
    with pytest.raises(InputError, match="damaged or not whole"):
        publish_model(folder, REPO, create=True)
    publish_model(other, REPO, create=True)
    entry = hub.store.entry("x.json", hub.store.put(path.read_bytes()))
    hub.store.commit(REPO, "main", "x", {f"Q4_K_M/{path.name}": entry})
    publish_model(made, REPO)
    assert "[MXFP4]" in text_of(hub, "README.md") and "[Q4_K_M]" not in text_of(hub, "README.md")
