"""Which engines give the same replies: two hashes that an engine reports once it is loaded."""

from __future__ import annotations

from msgspec import Struct


class Fingerprint(Struct, frozen=True):
    """`model`: of the files and of the options that change text, 16 hexadecimal digits.

    `arithmetic`: of the model and of all else that changes a bit of its numbers, `fp_` and 16 such digits;
    it is the `system_fingerprint` of replies. `weights`: of the files of weights alone. "": not known.

    A request may go to any engine of the same model. An engine that goes on with a reply of another one
    generates the very same rest only where the arithmetic is the same, too.
    """

    model: str = ""
    arithmetic: str = ""
    weights: str = ""


NO_FINGERPRINT = Fingerprint()
