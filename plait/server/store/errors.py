"""The errors of the store, as clients meet them."""

from __future__ import annotations

from plait.errors import CapacityError, InvalidField, RequestError

START = "nothing is stored here; start the server with --store PATH"


class StoreOff(InvalidField):
    """The request needs the store, and the server was started without one."""

    code = "store_off"


class NotStored(RequestError):
    """Nothing under this id belongs to the caller's key. Another key's id reads the same."""

    status = 404
    code = "not_found"


class PreviousNotStored(NotStored):
    """The response that a conversation should go on from is not there."""

    status = 400
    code = "previous_response_not_found"


class InUse(RequestError):
    """What a running batch or response needs cannot be changed or deleted now."""

    status = 409
    code = "in_use"


class StoreFull(CapacityError):
    """The disk or `--store-limit` is full of what may not be deleted."""

    code = "store_full"


class StoreUnavailable(CapacityError):
    """The database cannot be read or written: damaged, read-only, or locked."""

    code = "store_unavailable"
