"""The self-check of kernels, before they are bound on a processor where they were never tried."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from plait.kernels import load as kernels
from plait.kernels.cpu import self_check
from plait.kernels.cpu.codegen import target
from plait.ops.norm import rms_norm
from plait.ops.registry import Op, Variant


@pytest.fixture
def asked_anew() -> Iterator[None]:
    self_check.refusal.cache_clear()
    yield
    self_check.refusal.cache_clear()


@pytest.mark.slow  # it compiles kernels of its own
def test_kernels_pass_where_they_are_right(cpu: Any) -> None:
    assert self_check.failures() == []


def test_products_that_wrap_are_found(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = cpu.launch

    def saturated(kernel: Any, u: Any, *rest: Any, **sizes: Any) -> None:
        """As an instruction for codes of seven bits computes a product of eight."""
        launch(kernel, u & 127, *rest, **sizes)

    monkeypatch.setattr(cpu, "launch", saturated)
    assert self_check.wrong_products(cpu)


def test_a_rounding_towards_zero_is_found(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = cpu.launch

    def cut(kernel: Any, x: Any, half: Any, brain: Any, *rest: Any, **sizes: Any) -> None:
        launch(kernel, x, half, brain, *rest, **sizes)
        brain.view(self_check.torch.int16)[:] = x.view(self_check.torch.int32) >> 16

    monkeypatch.setattr(cpu, "launch", cut)
    assert self_check.wrong_roundings(cpu)


def test_an_op_that_is_off_its_tolerance_is_found(cpu: Any) -> None:
    case = dict(tokens=5, hidden=136, groups=1)

    def off(x: Any, weight: Any, eps: float, groups: int) -> Any:
        return rms_norm.reference(x, weight, eps, groups) * 1.001

    spoilt = Op(
        "rms_norm", rms_norm.reference, [case], rms_norm.tolerance, make=rms_norm.make,
        variants=[Variant("native", "cpu", off, lambda facts: None)],
    )  # fmt: skip
    assert self_check.differs(spoilt, case, cpu)
    assert not self_check.differs(rms_norm, case, cpu)


@pytest.mark.usefixtures("asked_anew")
def test_where_a_check_fails_there_is_no_executor_and_the_check_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target, "X86_64", False)
    monkeypatch.setattr(self_check, "failures", lambda: ["attention"])
    with caplog.at_level(logging.WARNING, "plait"):
        assert kernels.executor(1) is None
        assert kernels.executor(1) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1  # checked once
    assert "wrong results: attention" in told[0]
    assert "attention" in (kernels.why_no_kernels() or "")


@pytest.mark.usefixtures("asked_anew")
def test_where_all_checks_pass_kernels_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "X86_64", False)
    monkeypatch.setattr(self_check, "failures", list)
    made = kernels.executor(1)
    assert made is not None
    made.close()


def test_x86_64_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> str:
        raise AssertionError("kernels of x86-64 are tested where they are made")

    monkeypatch.setattr(target, "X86_64", True)
    monkeypatch.setattr(self_check, "refusal", never)
    assert kernels.why_no_kernels() is None
