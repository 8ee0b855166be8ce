"""Names of objects keep layouts, ranks and keys apart, and can't leave their place."""

import pytest

from ayni.blocks.objects import ObjectStoreConfig
from ayni.blocks.sequence_hash import SequenceHash, hash_tokens, synthetic
from ayni.errors import BadRequest
from worker_agent.blocks.objects.keys import MAX_NAME_BYTES, MAX_RANK, Shelf

FINGERPRINT = "0a" * 32
KEY = hash_tokens(range(32), 16)[1]


def test_names():
    shelf = Shelf(prefix="kv/", fingerprint=FINGERPRINT, rank=2)
    name = f"kv/{FINGERPRINT}/2/1:e7M2YKsP2kY:CWcXu8NnaFS"
    assert shelf.object_name(KEY) == name
    assert shelf.lock_name(KEY) == f"{name}.lock"
    assert shelf.meta_name(KEY) == f"{name}.meta"


def test_no_two_things_have_one_name():
    keys = [KEY, hash_tokens(range(16), 16)[0], synthetic("a", 0), synthetic("a", 1)]
    shelves = [Shelf(prefix=p, fingerprint=f * 64, rank=r) for p in ("", "p/") for f in "ab" for r in (0, 1)]
    names = [name(key) for s in shelves for name in (s.object_name, s.lock_name, s.meta_name) for key in keys]
    assert len(set(names)) == len(names) == 2 * 2 * 2 * 3 * 4


@pytest.mark.parametrize("fingerprint", ["", "0a" * 31, "0A" * 32, "0g" * 32, "../" * 21 + "a"])
def test_fingerprint_must_be_one(fingerprint):
    with pytest.raises(BadRequest, match="fingerprint"):
        Shelf(fingerprint=fingerprint, rank=0)


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1])
def test_rank_must_be_one(rank):
    with pytest.raises(BadRequest, match="rank"):
        Shelf(fingerprint=FINGERPRINT, rank=rank)


@pytest.mark.parametrize("prefix", ["/", "/a", "a//b", "../", "a/../b/", "..", ".", "a/./", "a\nb", "a\0", "x" * 1000])
def test_prefix_that_leads_astray_is_refused(prefix):
    with pytest.raises(BadRequest, match="prefix"):
        Shelf(prefix=prefix, fingerprint=FINGERPRINT, rank=0)


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b-", "..a/", "model v1/"])
def test_other_prefixes_are_put_in_front(prefix):
    assert Shelf(prefix=prefix, fingerprint=FINGERPRINT, rank=0).object_name(KEY).startswith(prefix + FINGERPRINT)


def test_longest_name_fits_into_every_store():
    longest = SequenceHash(current=2**64 - 1, parent=2**64 - 1, position=2**32 - 1, flags=0x14)
    prefix = "x" * 800
    while True:
        try:
            name = Shelf(prefix=prefix, fingerprint=FINGERPRINT, rank=MAX_RANK).lock_name(longest)
        except BadRequest:
            break
        prefix += "x"
    assert len(name.encode()) == MAX_NAME_BYTES


@pytest.mark.fact("T114")
def test_defaults_of_an_object_store():
    config = ObjectStoreConfig(kind="s3", bucket="blocks")
    assert (config.max_requests, config.prefix, config.endpoint, config.path_style) == (16, "", "", False)
    assert config.request_timeout_s == 30.0
