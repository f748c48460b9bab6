"""How much memory the files of a run may take beyond what they have on disk."""

from __future__ import annotations

from backnorm.errors import ArgumentValueError

__all__ = ["MEBIBYTES", "Allowance"]

#: What is allowed if nobody says otherwise.
MEBIBYTES = 1024

# A byte of JSON takes up to 44 bytes once it is Python's objects (of lists in lists), one of an
# archive's directory some 20; and there is what we make of them.
_TEXT = 64
# So much is never too much.
_LITTLE_TEXT = 128 * 1024


class Allowance:
    """Memory for what compressed tensors unpack to, all together, and for JSON.

    A file of a few megabytes can unpack to a thousand times as many. What is not compressed is as
    large as its file, and needs no allowance.

    Parameters
    ----------
    mebibytes : int

    Attributes
    ----------
    text : int
        Bytes that JSON, a header or an archive's directory may have.
    hint : str
        What an error should say of how to get more.
    """

    hint = "--max-unpacked MIB allows more, to a file that is trusted"

    def __init__(self, mebibytes: int = MEBIBYTES) -> None:
        self._all = self._left = mebibytes * 2**20
        self.text = max(self._all // _TEXT, _LITTLE_TEXT)

    def check_text(self, size: int, where: str, what: str) -> None:
        """Raise if `what` at `where` has more bytes than are allowed."""
        if size > self.text:
            raise ArgumentValueError(
                where,
                f"{what} is too large",
                came=f"{size} bytes",
                accepted=f"at most {self.text} bytes",
                hint=self.hint,
            )

    def unpack(self, size: int, where: str) -> None:
        """Take `size` bytes for a compressed tensor, or raise if there are not so many left."""
        if size > self._left:
            raise ArgumentValueError(
                where,
                "unpacks to too much",
                came=f"{size} bytes",
                accepted=f"at most {self._left} of {self._all} bytes for all",
                hint=self.hint,
            )
        self._left -= size
