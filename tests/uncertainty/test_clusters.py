"""Cluster labels of documents and windows, and effective sample sizes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.uncertainty import cluster_labels, effective_sample_size


def test_few_documents_are_split_into_blocks_of_neighbouring_windows():
    documents = np.repeat([7, 9], [20, 3])
    windows = np.concatenate([np.arange(20), np.arange(3)])
    labels, warnings = cluster_labels(documents, windows)
    assert labels.tolist() == [0] * 8 + [1] * 8 + [2] * 4 + [3] * 3
    (warning,) = warnings
    assert warning == (
        "the clusters are blocks of 8 neighbouring windows, since there are fewer than 30 documents (2): "
        "what blocks of one document share is missing from the error"
    )


def test_documents_are_split_below_thirty():
    cases = ((1, {}, True), (29, {}, True), (30, {}, False), (30, {"few": 31}, True))
    for documents, options, is_split in cases:
        ids = np.repeat(100 + np.arange(documents), 9)
        labels, warnings = cluster_labels(ids, np.tile(np.arange(9), documents), **options)
        blocks = np.arange(9) // 8 if is_split else np.zeros(9, int)
        assert labels.tolist() == [d * blocks.max() + d + block for d in range(documents) for block in blocks]
        assert bool(warnings) == is_split
    assert cluster_labels(np.arange(3), np.zeros(3, int)).warnings == (), "that of few clusters says it"


def test_labels_follow_the_order_of_the_sequences():
    labels, _ = cluster_labels([3, 1, 3, 1], [9, 0, 0, 1], block=2)
    assert labels.tolist() == [2, 0, 1, 0]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=60), st.integers(1, 9))
def test_no_block_spans_two_documents_and_labels_have_no_gaps(pairs, block):
    documents, windows = (np.array(column) for column in zip(*pairs, strict=True))
    labels, _ = cluster_labels(documents, windows, block=block)
    assert set(labels.tolist()) == set(range(labels.max() + 1))
    for label in set(labels.tolist()):
        assert len(set(documents[labels == label].tolist())) == 1
        assert np.ptp(windows[labels == label]) < block


def test_effective_sample_size_agrees_with_kish():
    assert effective_sample_size(np.ones(7)) == pytest.approx(7)
    assert effective_sample_size(np.array([1.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_sample_size(np.array([1.0, 2.0, 3.0])) == pytest.approx(36 / 14)
    assert effective_sample_size(np.array([1e300, 1e300])) == pytest.approx(2)
    assert effective_sample_size(np.array([1e-300, 1e-300, 1e-300])) == pytest.approx(3)
    for weights in ([], [0.0, 0.0], [1.0, math.inf], [1.0, math.nan]):
        assert math.isnan(effective_sample_size(np.array(weights)))
