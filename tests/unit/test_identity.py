"""Which worker names a client certificate allows."""

import pytest

from ayni.errors import IdentityRefused
from ayni.identity import check_identity


@pytest.mark.parametrize("name", ["ant", "ant-4711", "ant-gpu-1", "bee.example.org", "bee.example.org-7", "ant-"])
def test_the_name_itself_and_more_after_a_dash_are_allowed(name: str):
    check_identity(name, ("ant", "bee.example.org"))


@pytest.mark.parametrize("name", ["an", "ants", "ant4711", "ant.1", "ant_1", "Ant", " ant", "bee", "", "-", "dog-ant"])
def test_any_other_name_is_refused_with_both_sides(name: str):
    with pytest.raises(IdentityRefused) as caught:
        check_identity(name, ("ant", "bee.example.org"))
    assert caught.value.metadata == {"worker_name": name, "certificate": "ant, bee.example.org"}
    assert repr(name) in caught.value.message
    assert "is of ant, bee.example.org" in caught.value.message
    assert "scripts/make_certs.py --worker NAME" in caught.value.message


@pytest.mark.parametrize("names", [(), ("",), ("*",), ("*.example.org",)])
def test_no_name_an_empty_one_and_a_wildcard_allow_nothing(names: tuple[str, ...]):
    for worker_name in ("ant", "-ant", "bee.example.org"):
        with pytest.raises(IdentityRefused):
            check_identity(worker_name, names)


def test_a_certificate_of_very_many_names_is_quoted_in_part():
    with pytest.raises(IdentityRefused) as caught:
        check_identity("ant", [f"bee{number}" for number in range(1000)])
    assert caught.value.metadata["certificate"].endswith("bee7")
