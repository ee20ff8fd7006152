"""Give calls of ops that look up and select by indices or by values: embeddings, gathers, scatters, buckets."""

from __future__ import annotations

from operands import B, Calls, F, I, K, call, unary

INDEXING: Calls = [
    ("embedding", [call(F(6, 5), I(4, below=6)), call(F(6, 5), I(3, 4, below=6), 2), call(F(6, 1), I(2, 1, 3, below=6)),
                   call(F(6, 4), I(below=6))]),
    ("embedding_dense_backward",
     [call(F(4, 5), I(4, below=6), 6, -1, False), call(F(3, 4, 5), I(3, 4, below=6), 6, 2, False)]),
    ("embedding_dense_backward",
     [call(F(3, 4, 5), I(3, 4, below=2), 6, 0, True), call(F(5), I(below=6), 6, -1, False)]),
    ("index_select", [call(F(4, 5), 1, I(3, below=5)), call(F(4, 5), 0, I(7, below=4)),
                      call(F(2, 3, 4), -1, I(2, below=4)), call(F(5), 0, I(3, below=5))]),
    ("index_add", [call(F(4, 5), 1, I(3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, below=4), F(7, 5), alpha=0.5),
                   call(F(5), 0, I(6, below=5), F(6))]),
    ("gather", [call(F(4, 5), 1, I(4, 3, below=5)), call(F(4, 5), 0, I(7, 5, below=4)),
                call(F(4, 5), 1, I(2, 3, below=5)), call(F(5), 0, I(3, below=5))]),
    ("scatter_add", [call(F(4, 5), 1, I(4, 3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, 5, below=4), F(7, 5)),
                     call(F(4, 5), 1, I(2, 3, below=5), F(2, 3)), call(F(5), 0, I(3, below=5), F(4))]),
    ("scatter.src", [call(F(4, 5), 1, I(4, 3, below=5), F(4, 3)), call(F(4, 5), 0, I(7, 5, below=4), F(7, 5)),
                     call(F(4, 5), 1, I(2, 3, below=5), F(3, 4))]),
    ("scatter.value", [call(F(4, 5), 1, I(4, 3, below=5), 2.0), call(F(4, 5), 0, I(2, 5, below=4), 2.0),
                       call(F(4, 5), 1, I(2, 3, below=5), 1.0)]),
    ("index.Tensor", [call(F(4, 5), [I(3, below=4)]), call(F(4, 5), [None, I(3, below=5)]),
                      call(F(4, 5), [I(3, below=4), I(3, below=5)]),
                      call(F(2, 3, 4), [I(5, below=2), None, I(5, below=4)])]),
    ("index.Tensor", [call(F(4, 5), [I(3, 2, below=4)]), call(F(4, 5), [I(3, 1, below=4), I(2, below=5)]),
                      call(F(2, 3, 4), [None, I(below=3)]), call(F(4), [I(2, below=4)])]),
    ("index_put", [call(F(4, 5), [I(6, below=4)], F(6, 5), True), call(F(4, 5), [None, I(3, below=5)], F(4, 3), True),
                   call(F(4, 5), [I(3, 1, below=4), I(2, below=5)], F(3, 2), True)]),
    ("index_put", [call(F(4, 5), [I(3, below=4)], F(), True), call(F(4, 5), [I(1, below=4)], F(1, 5)),
                   call(F(2, 3, 4), [I(5, below=2), None, I(5, below=4)], F(5, 3), True)]),
    ("index_put", [call(F(4, 5), [I(6, below=4)], F(6, 5)), call(F(4, 5), [I(3, below=4)], F(1, 5), True),
                   call(F(4, 5), [B(4, 5)], F()), call(F(4, 5), [None, B(5)], F(4, 1))]),
    # seldom ones, of which torch's samples have none, or too few
    ("isin.Tensor_Scalar", unary(I, 2)),
    ("bucketize.Tensor", [call(F(4, 5), K([-1.0, 0.0, 0.5, 1.0])), call(F(), K([-1.0, 1.0]))]),
    ("bucketize.Scalar", [call(0.3, K([-1.0, 0.0, 0.5, 1.0]))]),
    ("searchsorted.Scalar", [call(K([-1.0, 0.0, 0.5, 1.0]), 0.3)]),
    ("isin.Tensor_Tensor", [call(I(4, 5), I(3)), call(I(6), I(2, 2))]),
    ("_embedding_bag "
     "_embedding_bag_forward_only",
     [call(F(6, 5), I(7, below=6), K([0, 3, 4]), False, mode, False, w) for mode, w in ((0, None), (0, F(7)), (1, None),
         (2, None))]),
    ("_embedding_bag_backward",
     [call(F(3, 5), I(7, below=6), K([0, 3, 4]), K([0, 0, 0, 1, 2, 2, 2]), K([3, 1, 3]), K([0, 0, 0]), 6, False, 0,
           False, w, -1) for w in (None, F(7))]),
    ("_embedding_bag_backward",
     [call(F(3, 5), I(7, below=6), K([0, 3, 4]), K([0, 0, 0, 1, 2, 2, 2]), K([3, 1, 3]), I(3, 5, below=6), 6, False, 2,
           False, None, -1)]),
]  # fmt: skip
