"""A PyTorch that says who imports it, and never comes to an end."""

import os
import time
from pathlib import Path

part = Path(os.environ["FAKE_TORCH_PID"] + ".part")
part.write_text(str(os.getpid()))
part.rename(os.environ["FAKE_TORCH_PID"])
time.sleep(600)
