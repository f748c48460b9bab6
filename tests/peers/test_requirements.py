"""A peer that is missing is skipped with a reason, and is a failure where it must be there."""

from __future__ import annotations

import pytest

from . import peers


def test_a_missing_peer_is_skipped(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BACKNORM_REQUIRE_PEERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Some peer is not installed"):
        peers.require(False, "Some peer")


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("BACKNORM_REQUIRE_PEERS", "1")])
def test_a_missing_peer_fails_where_it_is_required(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(pytest.fail.Exception, match="Some peer is not installed"):
        peers.require(False, "Some peer")


def test_a_driver_that_breaks_down_is_reported(tmp_path):
    with pytest.raises(AssertionError, match=r"onednn_graph_driver.py failed"):
        peers.run("onednn_graph_driver.py", [], tmp_path, str(tmp_path / "libdnnl.so.3"))
