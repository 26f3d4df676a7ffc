"""What recurrent state is kept in, as a mixer declares it (`plait.ops.state_rounding` has the rule)."""

from __future__ import annotations

from plait.checkpoint.weights import Target
from plait.errors import ConfigError
from plait.ops.state_rounding import row_nbytes


def float_state_dtype(target: Target, mixer: str) -> str:
    """`--state-dtype`, of a mixer that keeps floats. Raises ConfigError, with the mixer's name, for int8."""
    if target.state_dtype == "int8":
        raise ConfigError(
            f"state_dtype: int8 is for the states of Mamba2, and this model has {mixer}; bfloat16 is for both"
        )
    return target.state_dtype


def state_columns(target: Target, columns: int) -> int:
    """Numbers of `--state-dtype` that a row of `columns` takes."""
    return row_nbytes(columns) if target.state_dtype == "int8" else columns
