"""The model as plain, differentiable PyTorch without caches: the specification, executable.

Read it in this order; each module needs only those before it.

1. `norm`, `rotary`, `rounding`: RMSNorm and linear maps, rotary positions with YaRN, the cache formats' round trips.
2. `hyper`: the residual streams and how a layer reads and writes them.
3. `compressor`, `indexer`, `attention`: compressed KV, which of it a query sees, attention over window and selection.
4. `experts`, `engram`: the mixture of experts and the n-gram memory.
5. `block`: one layer, from all of these.
6. `vision`, `draft`: the image tower, and the drafter that proposes blocks of tokens.
7. `model`: the whole forward pass, with images and bounded replay, and greedy drafting. `loading` fills it.

Every function takes whole sequences, right-padded in a batch: [B, T, ...]. Letters in shapes: B sequences, T tokens,
R rows that are computed (all tokens, or a replayed suffix), H hidden size, S streams or, after R, compressed positions.
Activations have the dtype of the embedding, FP32 or BF16; parameters that a checkpoint stores in FP32 stay FP32, and
what the model defines in FP32 (norms, routing, coefficients, softmax, logits) is computed in FP32. All of it is
differentiable: rounding passes gradients straight through, and only the choices (experts, positions) pass none.
"""
