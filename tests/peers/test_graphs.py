"""benchdnn's graphs in oneDNN's library, each in a child process, beside ours."""

from __future__ import annotations

import pytest

from scripts import onednn_library_graphs as script
from scripts.benchdnn_graphs import suites, write
from tests.required import require

from .peers import onednn_library

# float16 needs a processor with arithmetic for it; without it this library ends the process.
FILES = [path for path in suites()["3.2"] if "/f16/" not in path]


@pytest.mark.long
@pytest.mark.peer
@pytest.mark.parametrize("path", FILES)
def test_onednn_library_matches_benchdnn_graph_in_one_partition(tmp_path, path):
    library = onednn_library()
    require(library is not None, "oneDNN (onednn-cpu-gomp)")
    write(tmp_path)
    outcome = script.compare(str(library), tmp_path / "3.2" / path, tmp_path)
    assert outcome.startswith("equal: ")
    assert outcome.endswith("; 1 partition")
