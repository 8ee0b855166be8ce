"""No file that a coordinator offers may lead out of its folder."""

import pytest

from worker_agent.artifact_names import Artifact, check_artifacts

SHA = "0f" * 32


def offered(*names: str, sha256: str = SHA, size_bytes: int = 5) -> list[Artifact]:
    return [Artifact(name=name, sha256=sha256, size_bytes=size_bytes) for name in names]


def test_ordinary_names_are_accepted():
    check_artifacts(offered("train.txt", "model/config.json", "model/sub/x y.bin", "..data", "a/b..c", "\u00fcber.txt"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../x", 'an empty part, "." or ".."'),
        ("a/../../x", 'an empty part, "." or ".."'),
        ("a/..", 'an empty part, "." or ".."'),
        ("./a", 'an empty part, "." or ".."'),
        ("a//b", "an empty part"),
        ("a/", "an empty part"),
        ("", "an empty part"),
        ("/etc/passwd", "an absolute path"),
        ("a\\..\\b", "a backslash"),
        ("c:x", "a colon"),
        ("a\0b", "can't be printed"),
        ("a\nb", "can't be printed"),
        ("x" * 1025, "longer than 1024 bytes"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        check_artifacts(offered(name))


@pytest.mark.parametrize("sha256", ["", "0F" * 32, "0f" * 31, "../" + SHA[3:], SHA + "\n"])
def test_a_hash_is_a_hash(sha256):
    with pytest.raises(ValueError, match="is not 64 lower-case hex digits"):
        check_artifacts(offered("a", sha256=sha256))


@pytest.mark.parametrize("size_bytes", [-1, 1 << 60])
def test_a_size_is_within_reason(size_bytes):
    with pytest.raises(ValueError, match=f"its size is {size_bytes} bytes"):
        check_artifacts(offered("a", size_bytes=size_bytes))


@pytest.mark.parametrize(
    ("names", "words"),
    [(("a", "a"), "occurs twice"), (("a/b", "a"), "a folder and a file"), (("a", "a/b/c"), "folder")],
)
def test_two_names_that_collide_are_refused(names, words):
    with pytest.raises(ValueError, match=words):
        check_artifacts(offered(*names))
