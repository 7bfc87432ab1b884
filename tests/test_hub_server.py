"""The test Hub against the real client's own requests."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import httpx2
import pytest
from hub_api import SIGNATURE
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

CARD = b"---\nlicense: mit\ntags: [gguf]\n---\n# Model\n"


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    assert hub.endpoint == constants.ENDPOINT
    assert constants.HF_HUB_DISABLE_XET
    return HfApi(token=TOKEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "Q4").mkdir(parents=True)
    (made / "README.md").write_bytes(CARD)
    (made / "Q4" / "m.gguf").write_bytes(bytes(range(256)) * 1000)
    return made


def test_the_client_creates_uploads_lists_and_downloads(api: HfApi, folder: Path, tmp_path: Path) -> None:
    assert api.whoami()["name"] == "tester"
    api.create_repo("org/model", private=True)
    api.create_repo("org/model", exist_ok=True)
    commit = api.upload_folder(repo_id="org/model", folder_path=folder)
    info = api.model_info("org/model", files_metadata=True)
    assert info.sha == commit.oid and info.private
    data = (folder / "Q4" / "m.gguf").read_bytes()
    files = {s.rfilename: s for s in info.siblings or []}
    large = files["Q4/m.gguf"].lfs
    assert large is not None and (large.size, large.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert files["README.md"].lfs is None
    assert {f.path for f in api.list_repo_tree("org/model", recursive=True)} == {"README.md", "Q4", "Q4/m.gguf"}
    assert [f.path for f in api.list_repo_tree("org/model")] == ["Q4", "README.md"]
    (found,) = api.get_paths_info("org/model", ["Q4/m.gguf", "absent"])
    assert found.size == len(data)
    assert [c.title for c in api.list_repo_commits("org/model")] == [
        "Upload folder using huggingface_hub",
        "initial commit",
    ]
    path = hf_hub_download("org/model", "Q4/m.gguf", cache_dir=tmp_path / "cache", token=TOKEN)
    assert Path(path).read_bytes() == data
    metadata = get_hf_file_metadata(hf_hub_url("org/model", "Q4/m.gguf"), token=TOKEN)
    assert (metadata.commit_hash, metadata.etag, metadata.size) == (commit.oid, large.sha256, len(data))


def test_a_second_upload_sends_no_bytes_and_makes_no_commit(api: HfApi, hub: HubServer, folder: Path) -> None:
    api.create_repo("org/model")
    first = api.upload_folder(repo_id="org/model", folder_path=folder)
    hub.requests.clear()
    again = api.upload_folder(repo_id="org/model", folder_path=folder)
    assert again.oid == first.oid
    assert not [r for r in hub.requests if r.method == "PUT" or "/commit/" in r.path]


def test_parts_are_joined_and_signed_addresses_see_no_token(api: HfApi, hub: HubServer, folder: Path) -> None:
    hub.multipart = 100_000
    api.create_repo("org/model")
    api.upload_folder(repo_id="org/model", folder_path=folder)
    uploads = [r for r in hub.requests if r.method == "PUT"]
    assert len(uploads) == 3
    assert not [r for r in uploads if r.authorization or not r.host.startswith("localhost")]
    assert hub.store.resolve("org/model", "main")[1]["Q4/m.gguf"]["size"] == 256_000


def test_branches_deletions_and_commits_on_an_old_parent(api: HfApi, hub: HubServer, folder: Path) -> None:
    api.create_repo("org/model")
    first = api.upload_folder(repo_id="org/model", folder_path=folder)
    api.create_branch("org/model", branch="next")
    api.delete_file("README.md", "org/model", revision="next")
    assert {b.name: b.target_commit for b in api.list_repo_refs("org/model").branches}["main"] == first.oid
    assert set(hub.store.resolve("org/model", "next")[1]) == {"Q4/m.gguf"}
    with pytest.raises(HfHubHTTPError, match="412"):
        api.upload_file(
            path_or_fileobj=b"x", path_in_repo="x", repo_id="org/model", revision="next", parent_commit=first.oid
        )


def test_absent_gated_and_private_things_get_the_clients_own_errors(api: HfApi, hub: HubServer, folder: Path) -> None:
    hub.store.add_folder("org/gated", folder, gated=True)
    hub.store.add_folder("org/private", folder, private=True)
    anonymous = HfApi(token=False)
    with pytest.raises(RepositoryNotFoundError):
        anonymous.model_info("org/absent")
    with pytest.raises(RepositoryNotFoundError):
        anonymous.model_info("org/private")
    with pytest.raises(RevisionNotFoundError):
        anonymous.model_info("org/gated", revision="absent")
    with pytest.raises(GatedRepoError):
        get_hf_file_metadata(hf_hub_url("org/gated", "Q4/m.gguf"), token=False)
    with pytest.raises(RemoteEntryNotFoundError):
        get_hf_file_metadata(hf_hub_url("org/gated", "absent"), token=TOKEN)
    assert anonymous.model_info("org/gated").gated == "manual"


def test_a_model_card_is_validated(api: HfApi) -> None:
    api.create_repo("org/model")
    card = b"---\nlicense: other\ntags: 3\n---\n"
    with pytest.raises(ValueError, match="license_name"), warnings.catch_warnings():
        api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="org/model")


def test_faults_happen_to_the_requests_they_name(api: HfApi, hub: HubServer, folder: Path) -> None:
    hub.store.add_folder("org/model", folder)
    data = (folder / "Q4" / "m.gguf").read_bytes()
    name = hashlib.sha256(data).hexdigest()
    url = f"{hub.endpoint}/cdn/{name}/m.gguf?{SIGNATURE}"
    ranged = {"Range": "bytes=100-299"}
    assert httpx2.get(url, headers=ranged).content == data[100:300]
    hub.fault("/cdn/", "short", at=10)
    assert httpx2.get(url, headers=ranged).headers["Content-Range"] == "bytes 100-109/256000"
    hub.fault("/cdn/", "whole")
    assert httpx2.get(url, headers=ranged).status_code == 200
    hub.fault("/cdn/", "flip", at=101)
    assert httpx2.get(url, headers=ranged).content == data[100:101] + bytes([data[101] ^ 1]) + data[102:300]
    hub.fault("/cdn/", "status", status=429, headers={"Retry-After": "7"})
    assert httpx2.get(url).headers["Retry-After"] == "7"
    for kind in ("cut", "drop"):
        hub.fault("/cdn/", kind, at=50)
        with pytest.raises(httpx2.RemoteProtocolError):
            httpx2.get(url, headers=ranged)
    assert httpx2.get(url, headers=ranged).content == data[100:300]


def test_a_late_failure_has_done_its_work(api: HfApi, hub: HubServer) -> None:
    api.create_repo("org/model")
    hub.fault("POST .*/commit/", "late", status=504)
    with pytest.raises(HfHubHTTPError, match="504"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="org/model")
    assert "x" in hub.store.resolve("org/model", "main")[1]
