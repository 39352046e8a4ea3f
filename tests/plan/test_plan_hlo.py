"""Reading programs of a few lines in the compiler's form."""

import pytest

from jetserve.plan import hlo

TEXT = """\
HloModule jit__forward

%body (p: f32[8]) -> f32[8] {
  %a = f32[8] fusion(%p), backend_config={"window_config":{"estimated_cycles":"10"}}
}

%counted (p: f32[8]) -> f32[8] {
  %b = f32[8] fusion(%p), backend_config={"window_config":{"estimated_cycles":"100"}}
  %w = f32[8] while(%b), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {
  %f = bf16[8,64] fusion(%x), backend_config={"window_config":{"estimated_cycles":"1000"}}
  %r = bf16[8,64]{1,0:T(8,128)(2,1)} all-reduce(%f), replica_groups={{0,1,2,3}}
  %s = (s8[16], s8[64]) all-gather-start(%q), dimensions={0}
  %d = s8[64] all-gather-done(%s)
  %k = f32[8] custom-call(%r), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"estimated_cycles":"20000",
"hbm_bytes":"64"
}}
  %w1 = f32[8] while(%r), condition=%c, body=%counted
}
"""


def test_collectives() -> None:
    found = hlo.collectives(TEXT)
    assert [(c.kind, c.result_bytes) for c in found] == [("all-reduce", 1024), ("all-gather", 64)]
    assert found[0].bytes_sent(4) == pytest.approx(2 * 3 / 4 * 1024)


def test_cycles_of_loops_count_as_often_as_they_run() -> None:
    assert hlo.cycles(TEXT, unknown_trips=2) == 1000 + 20000 + 2 * (100 + 3 * 10)


def test_bytes_that_kernels_say_they_read() -> None:
    assert hlo.kernel_bytes(TEXT) == 64
