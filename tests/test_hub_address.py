"""What users write for a place on the Hub."""

from __future__ import annotations

import pytest

from kimi_gguf.hub.address import HubAddress, parse_address
from kimi_gguf.hub.faults import scrub
from quant.errors import UsageError

SPELLINGS = {
    "owner/name": HubAddress("owner/name"),
    "owner/name@v1.0": HubAddress("owner/name", "v1.0"),
    "hf://owner/name": HubAddress("owner/name"),
    "hf://owner/name@refs/pr/3": HubAddress("owner/name", "refs/pr/3"),
    "hf://owner/name@main/Q4_K_M/a.gguf": HubAddress("owner/name", "main", "Q4_K_M/a.gguf"),
    "https://huggingface.co/owner/name": HubAddress("owner/name"),
}


@pytest.mark.parametrize(("text", "address"), SPELLINGS.items(), ids=SPELLINGS.keys())
def test_spellings(text: str, address: HubAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["name", "./owner/name", "/owner/name", "a/b/c", "../name", "~/name", ""])
def test_what_can_only_be_a_path_is_no_address(text: str) -> None:
    assert parse_address(text) is None


@pytest.mark.parametrize("text", ["hf://", "hf://name", "hf://datasets/owner/name", "hf://owner/name@", "a/b--c"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


def test_an_address_is_printed_as_it_is_read() -> None:
    for address in SPELLINGS.values():
        assert parse_address(str(address)) == address


def test_messages_lose_tokens_and_signatures() -> None:
    text = "at https://cdn.example/a/b?X-Amz-Signature=ab&c=d\n for hf_abcdefghijk"
    assert scrub(text) == "at https://cdn.example/a/b for ***"
