"""Fourier transforms. They are linear; the dims that are transformed stay whole."""

from __future__ import annotations

from autopar.rules.dims import along
from autopar.rules.registry import rule

rule(along("whole -> whole", 1), "_fft_c2c", linear="0", empty=False)
rule(along("whole -> part", 1), "_fft_r2c _fft_c2r", linear="0", empty=False)
