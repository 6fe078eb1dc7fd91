"""A model that calls attention on the GPU is packaged for AOTInductor, loaded and run."""

import shutil

import pytest

from support.packaged import assert_as_it_was


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor wants a C++ compiler")
def test_a_packaged_model_computes_what_the_model_did():
    assert_as_it_was("cuda")
