export type paths = Record<string, never>;
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * NativeError
         * @description Body of an error.
         *
         *         Attributes:
         *             error: What is wrong, and how to fix it.
         *             reason: Machine-readable reason, such as INVALID_FIELD.
         *             violations: Invalid fields.
         *             metadata: Further values by name.
         */
        NativeError: {
            error: string;
            reason: string;
            /** @default [] */
            violations: {
                [key: string]: string;
            }[];
            /** @default {} */
            metadata: {
                [key: string]: string;
            };
        };
        /** @description Array as nested lists. NaN is null. */
        NestedList: unknown[];
        /**
         * @description Activation function.
         *
         *     - `unspecified`: Never in a valid bundle.
         *     - `identity`: x
         *     - `tanh`: tanh(x)
         *     - `relu`: max(0, x)
         *     - `gelu`: x / 2 (1 + erf(x / sqrt(2)))
         *     - `sigmoid`: 1 / (1 + exp(-x))
         *     - `silu`: x / (1 + exp(-x))
         *     - `softmax`: exp(x(i)) / sum of exp(x(j)), over all components. Only for the scores of a classifier.
         *     - `gelu_tanh`: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
         * @enum {string}
         */
        "attnlens.v1.Activation": "unspecified" | "identity" | "tanh" | "relu" | "gelu" | "sigmoid" | "silu" | "softmax" | "gelu_tanh";
        /** @description Sizes of an encoder, with their dimension names in the documentation. */
        "attnlens.v1.Architecture": {
            /** @description Encoder family, such as `bert`. */
            family: string;
            /** @description D: size of a token vector. */
            hidden_size: number;
            /** @description L: number of layers. */
            num_layers: number;
            /** @description H: number of attention heads per layer. The maximum if layers differ. */
            num_heads: number;
            /** @description Intermediate size of the feed-forward network. */
            intermediate_size: number;
            /** @description Vocabulary size. Valid token ids are 0 to vocab_size - 1. */
            vocab_size: number;
            /** @description Number of token types. 0 if the graphs have no `token_type_ids` input. */
            type_vocab_size: number;
            /** @description Maximum number of tokens that the encoder has positions for. For example, 512 for a table of 514 position embeddings whose first two are for padding. */
            max_position_embeddings: number;
            /** @description Token id used for padding. */
            pad_token_id: number;
            /** @description Whether tokens only attend to themselves and to earlier tokens. */
            is_causal: boolean;
            /** @description Layers, in order. */
            layers: components["schemas"]["attnlens.v1.LayerInfo"][];
        };
        /**
         * @description Unit of the rows and columns of attention weights.
         *
         *     - `unspecified`: Same as ATTENTION_LEVEL_TOKENS.
         *     - `tokens`: Tokens.
         *     - `words`: Words: tokens of a text with the same `Token.word_index`. A prompt is part of the text after it. Each special token is a separate word. Weights are summed over the tokens of a key word and averaged over the tokens of a query word, which preserves row sums. Not available for `TokenIds`, which have no words.
         * @enum {string}
         */
        "attnlens.v1.AttentionLevel": "unspecified" | "tokens" | "words";
        /** @description Selects attention to return for each input. */
        "attnlens.v1.AttentionQuery": {
            /** @description Layer output to return, one of the roles in `Model.outputs`. Defaults to OUTPUT_ROLE_ATTENTION_WEIGHTS. */
            role?: components["schemas"]["attnlens.v1.OutputRole"] | null;
            /** @description Layer indices. If empty, all layers that have such an output. */
            layers?: number[] | null;
            /** @description Head indices. If empty, all heads. */
            heads?: number[] | null;
            /** @description How to return the selected heads. */
            view?: components["schemas"]["attnlens.v1.AttentionView"] | null;
            /** @description Reduction of the weights, such as words, rollout or the largest weights. If unset, none. Weights of OUTPUT_LAYOUT_BAND and OUTPUT_LAYOUT_BLOCKS are converted to dense weights first, independent of `view`. */
            reduction?: components["schemas"]["attnlens.v1.AttentionReduction"] | null;
        };
        /** @description Reduces attention weights on the server. The steps always run in this order:  1. Select layers and heads (`AttentionQuery.layers`, `AttentionQuery.heads`). 2. `level`: merge tokens into words. 3. `special_tokens`: drop special tokens and rescale each row to sum to 1. 4. Average: over heads (ATTENTION_VIEW_HEAD_MEAN), then `layers`, then `mean_over_rows` or the statistics of `form`. 5. `rows`: select rows. 6. `form`: keep the largest weights or those that reach a threshold, or quantize to 8 bits.  U is the number of units, i.e. tokens or words, after steps 2 and 3. R is the number of rows after step 5: U, the number of `rows`, or 1 with `mean_over_rows`. Invalid combinations are rejected with the field and a remedy. Reductions need weights between tokens, so OUTPUT_ROLE_HEAD_GATES can't be reduced. */
        "attnlens.v1.AttentionReduction": {
            /** @description Unit of rows and columns. Defaults to tokens. */
            level?: components["schemas"]["attnlens.v1.AttentionLevel"] | null;
            /** @description Whether to keep special tokens. Defaults to keeping them. */
            special_tokens?: components["schemas"]["attnlens.v1.SpecialTokens"] | null;
            /** @description How to combine layers. Defaults to returning each layer. */
            layers?: components["schemas"]["attnlens.v1.LayerReduction"] | null;
            /** @description Residual weight r of LAYER_REDUCTION_ROLLOUT, with 0 <= r < 1. If unset, 0.5. */
            rollout_residual?: number | null;
            /** @description Whether to return the mean over all rows, with a row axis of length 1. */
            mean_over_rows?: boolean | null;
            /** @description Indices of the units whose rows to return, in this order. At most 16384, without duplicates. Each text must have all of them. If empty, all rows. */
            rows?: number[] | null;
            /** @description The largest weights of each row. */
            top_k?: components["schemas"]["attnlens.v1.TopK"] | null;
            /** @description The weights that reach a threshold. */
            threshold?: components["schemas"]["attnlens.v1.Threshold"] | null;
            /** @description Statistics of rows and columns instead of the weights. */
            statistics?: components["schemas"]["attnlens.v1.RowStatistics"] | null;
            /** @description Weights quantized to 8 bits. */
            sqrt_uint8?: components["schemas"]["attnlens.v1.SqrtUint8"] | null;
        };
        /** @description Result of one query for one input. */
        "attnlens.v1.AttentionResult": {
            /** @description Index of the query in the request. */
            query_index: number;
            /** @description Layer output. */
            role: components["schemas"]["attnlens.v1.OutputRole"];
            /** @description View of the heads. */
            view: components["schemas"]["attnlens.v1.AttentionView"];
            /** @description Layer index of each entry of the layer axis. With LAYER_REDUCTION_MEAN and LAYER_REDUCTION_ROLLOUT, the combined layers in the requested order. */
            layers: number[];
            /** @description Head index of each entry of the head axis. With ATTENTION_VIEW_HEAD_MEAN, the averaged heads. */
            heads: number[];
            /** @description Sum of each row. */
            row_sum: components["schemas"]["attnlens.v1.RowSum"];
            /** @description OUTPUT_LAYOUT_DENSE: element (l, h, i, j) is how much token i attends to token j. Shape (layers, heads, T, T), or (layers, heads, R, U) with a reduction. */
            dense?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description OUTPUT_LAYOUT_PER_TOKEN: element (l, i, h) is how much token i uses head h. Shape (layers, T, heads). */
            per_token?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description OUTPUT_LAYOUT_BAND: shape (layers, heads, T, 2G + 2w + 1), see `band_pattern`. */
            band?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description OUTPUT_LAYOUT_BLOCKS: shape (layers, heads, T, S * b + 2b), see `block_pattern`. */
            blocks?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Result of TopK. */
            top_k?: components["schemas"]["attnlens.v1.TopKWeights"];
            /** @description Result of Threshold. */
            sparse?: components["schemas"]["attnlens.v1.SparseWeights"];
            /** @description Result of RowStatistics. */
            statistics?: components["schemas"]["attnlens.v1.AttentionStatistics"];
            /** @description Result of SqrtUint8: DATA_TYPE_UINT8, shape (layers, heads, R, U). */
            sqrt_uint8?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Window and global tokens. Set with `band`. */
            band_pattern?: components["schemas"]["attnlens.v1.Band"];
            /** @description Blocks that each block attends to. Set with `blocks`. */
            block_pattern?: components["schemas"]["attnlens.v1.BlockPattern"];
            /** @description Unit index of each of the T tokens, or -1 for a dropped token. Set with ATTENTION_LEVEL_WORDS and SPECIAL_TOKENS_DROP, otherwise empty. */
            unit_ids: number[];
            /** @description Weight that each row assigned to special tokens before they were dropped, shape (layers, heads, R). The mean if heads, layers or rows were averaged or combined. Set with SPECIAL_TOKENS_DROP. */
            special_token_mass?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /** @description Statistics of attention weights. Each is set if requested. */
        "attnlens.v1.AttentionStatistics": {
            /** @description Attention received by each unit, shape (layers, heads, U). */
            received?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Entropy of each row in nats, shape (layers, heads, R). */
            entropy?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /**
         * @description How to return the heads of a layer output.
         *
         *     - `unspecified`: ATTENTION_VIEW_HEAD_MEAN for a rollout, otherwise ATTENTION_VIEW_FULL.
         *     - `full`: Each selected head, in the layout of the graph.
         *     - `head_mean`: The mean over the selected heads, with a head axis of length 1. For OUTPUT_LAYOUT_BLOCKS, the mean is dense, because each head can attend to different blocks.
         *     - `dense`: Each selected head. OUTPUT_LAYOUT_BAND and OUTPUT_LAYOUT_BLOCKS are converted to dense weights.
         * @enum {string}
         */
        "attnlens.v1.AttentionView": "unspecified" | "full" | "head_mean" | "dense";
        /** @description A sliding window of w tokens on each side, and global tokens: the first G tokens attend to, and are attended to by, every token. The row of token i has 2G + 2w + 1 weights:  - G weights from token i to each global token. - 2w + 1 weights from token i to tokens i - w to i + w, 0 for global tokens. - G weights from each global token to token i.  In the row of a global token, the first G + 2w + 1 weights are 0. */
        "attnlens.v1.Band": {
            /** @description Window radius w. */
            window_radius: number;
            /** @description Number of global tokens G. */
            num_global_tokens: number;
        };
        /** @description Describes `AttentionResult.blocks`. A text has C blocks of b tokens; the last block can be shorter. The row of token i has S slots of b values, followed by 2b values:  - Slot s: weights from token i to the tokens of block `key_blocks[..., c, s]`, where c is the block of token i. If two slots contain the same token, its weight is their sum. - The next b values: weights from each token of the first block to token i. - The last b values: weights from each token of the last block to token i.  If all slots of the first or last block are -1, that block attends to all tokens, and its b values contain the weights. Otherwise, ignore its b values. */
        "attnlens.v1.BlockPattern": {
            /** @description Block size b. */
            block_size: number;
            /** @description Index of the key block in each slot, or -1 for an unused slot. DATA_TYPE_INT32, shape (layers, heads, C, S). */
            key_blocks?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /** @description Attention between blocks of b tokens, for texts of any length:  - In a text of up to `max_full_blocks` blocks, all blocks attend to all. - In a longer text, the first and last block attend to all. Any other block attends to the first, the last, the previous block, itself, the next block, and r random blocks.  The row of token i has S slots of b weights, where S is the larger of `max_full_blocks` and 5 + r, followed by 2b weights:  - S slots: weights from token i to the tokens of each block that its block attends to, in the order above. If two slots contain the same token, its weight is their sum. The slot of a previous or next block is unused if this is the first or last block of the text. - b weights from each token of the first block to token i. - b weights from each token of the last block to token i.  The last 2b weights are only used for longer texts. There, the slots in the rows of the first and last block are 0. */
        "attnlens.v1.BlockTable": {
            /** @description Block size b. */
            block_size: number;
            /** @description Maximum number of blocks for full attention. */
            max_full_blocks: number;
            /** @description Random blocks of blocks 1 to N for each head, DATA_TYPE_INT32, shape (H, N, r). Entries that are -1 or beyond the text are not attended to. */
            random_blocks?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /** @description Strings around each text, as rendered by the chat template of the tokenizer. The rendered text is tokenized without the special tokens of `tokenizer.json`, which the template contains instead. If it has `max_tokens` tokens or more, it is truncated to this number, and its last tokens are then replaced by those of the end of the template: the longest common end of the rendered texts `0` and `1 2 3 4`. */
        "attnlens.v1.ChatTemplate": {
            /** @description Strings around a text without a prompt. */
            without_prompt?: components["schemas"]["attnlens.v1.TextFrame"];
            /** @description Strings around a text with a prompt, which is the system message. Unset if the template has no system message. */
            with_prompt?: components["schemas"]["attnlens.v1.TextFrame"];
        };
        /** @description Head that computes the logits of a text or pair: C numbers, one per label. A reranker has one label, and its logit is the relevance of the second text to the first. */
        "attnlens.v1.Classifier": {
            /** @description Names of the labels, in the order of the logits. */
            labels: string[];
            /** @description Function from logits to scores that the checkpoint specifies, or the default of sentence-transformers for rerankers and of transformers for classifiers. ACTIVATION_IDENTITY, ACTIVATION_SIGMOID or ACTIVATION_SOFTMAX. */
            activation: components["schemas"]["attnlens.v1.Activation"];
        };
        /** @description Request message for EncoderService.Classify. */
        "attnlens.v1.ClassifyRequest": {
            /** @description Model name. If empty, the server's default model. */
            model?: string | null;
            /** @description Inputs to classify. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Function from logits to scores: ACTIVATION_IDENTITY, ACTIVATION_SIGMOID or ACTIVATION_SOFTMAX. Defaults to `Classifier.activation`. */
            activation?: components["schemas"]["attnlens.v1.Activation"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Classify. */
        "attnlens.v1.ClassifyResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Names of the C labels, in the order of the logits. */
            labels: string[];
            /** @description Logits, DATA_TYPE_FLOAT32, shape (N, C). */
            logits?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Activation of the logits, computed in float64, DATA_TYPE_FLOAT32, shape (N, C). */
            scores?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Function that computed the scores from the logits. */
            activation: components["schemas"]["attnlens.v1.Activation"];
            /** @description Token counts of each input. */
            usages: components["schemas"]["attnlens.v1.Usage"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
        };
        /** @description Request message for EncoderService.Compare. The similarity of a pair is the cosine of the embeddings that Embed returns. */
        "attnlens.v1.CompareRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Pairs to compare. At least 1 and at most `Limits.max_inputs_per_request`. A pair counts as two inputs in `Limits.max_concurrent_inputs`. */
            pairs: components["schemas"]["attnlens.v1.ComparedPair"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for the first input of each pair. If unset, the model's default prompt, if there is one. */
            prompt_a?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Prompt for the second input of each pair. If unset, the model's default prompt, if there is one. */
            prompt_b?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Pooling, see `EmbedRequest.pooling`. */
            pooling?: components["schemas"]["attnlens.v1.Pooling"] | null;
            /** @description Number of leading components to keep, see `EmbedRequest.dimensions`. */
            dimensions?: number | null;
            /** @description Methods that explain each side. If empty, EXPLAIN_METHOD_CONTRIBUTIONS. */
            methods?: components["schemas"]["attnlens.v1.ExplainMethod"][] | null;
            /** @description Unit of scores and of the rows and columns of the matrix. Defaults to tokens. */
            level?: components["schemas"]["attnlens.v1.ExplainLevel"] | null;
            /** @description Whether to return the contribution of each head. Needs EXPLAIN_METHOD_CONTRIBUTIONS. */
            head_contributions?: boolean | null;
            /** @description Matrix to return for pairs of tokens. Defaults to none. */
            matrix?: components["schemas"]["attnlens.v1.PairMatrix"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Compare. */
        "attnlens.v1.CompareResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Comparison of each pair, in the order of the request. */
            results: components["schemas"]["attnlens.v1.Comparison"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
            /** @description Function of `Comparison.similarity`, see `Model.similarity`. */
            similarity: components["schemas"]["attnlens.v1.Similarity"];
        };
        /** @description Two inputs to compare, each with its own embedding. */
        "attnlens.v1.ComparedPair": {
            /** @description First input. */
            a: components["schemas"]["attnlens.v1.Input"];
            /** @description Second input. */
            b: components["schemas"]["attnlens.v1.Input"];
        };
        /** @description Explains the similarity of two inputs. i is a token of the first input and j a token of the second; with EXPLAIN_LEVEL_WORDS, i and j are words. */
        "attnlens.v1.Comparison": {
            /** @description The first input, explained towards the second. */
            a?: components["schemas"]["attnlens.v1.Explanation"];
            /** @description The second input, explained towards the first. */
            b?: components["schemas"]["attnlens.v1.Explanation"];
            /** @description Cosine of the two embeddings, or their dot product for a model with SIMILARITY_DOT. It is also the target value of both explanations. */
            similarity: number | null;
            /** @description `CompareRequest.matrix`: element (i, j) belongs to tokens i and j. Set if requested. */
            matrix?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description PAIR_MATRIX_INPUT only: element (j) belongs to the biases of the first input and token j. `matrix`, `baseline_row`, `baseline_column` and `baseline` add up to `similarity`. */
            baseline_row?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description PAIR_MATRIX_INPUT only: element (i) belongs to token i and the biases of the second input. */
            baseline_column?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description PAIR_MATRIX_INPUT only: contribution of the biases of both inputs. */
            baseline?: number | null;
        };
        /** @description How a result was computed. Only compare vectors that have the same `Computation` and model version. */
        "attnlens.v1.Computation": {
            /** @description Engine that ran the graph, see `Model.engine`. */
            engine: string;
            /** @description Precision of the computation. Attention and explanations are always computed in PRECISION_FP32. */
            precision: components["schemas"]["attnlens.v1.Precision"];
        };
        /** @description Explains why an input is more similar to one text than to another. d is the normalized embedding of `to` minus that of `rather_than`. */
        "attnlens.v1.Contrast": {
            /** @description Input that d points towards. */
            to: components["schemas"]["attnlens.v1.Input"];
            /** @description Input that d points away from. */
            rather_than: components["schemas"]["attnlens.v1.Input"];
        };
        /**
         * @description Element type of a tensor, in a graph or in a message.
         *
         *     - `unspecified`: Not specified. In a request, DATA_TYPE_FLOAT32.
         *     - `float32`: IEEE 754 binary32.
         *     - `float16`: IEEE 754 binary16.
         *     - `int32`: Signed 32-bit integer. Used for indices.
         *     - `int64`: Signed 64-bit integer. Only used for graph inputs, never in messages.
         *     - `bfloat16`: Upper 16 bits of a binary32 (bfloat16). Not used yet.
         *     - `uint8`: Unsigned 8-bit integer. Used for quantized weights, see `AttentionResult.sqrt_uint8`, and quantized embeddings.
         *     - `int8`: Signed 8-bit integer. Used for quantized embeddings, see `EmbeddingType`.
         * @enum {string}
         */
        "attnlens.v1.DataType": "unspecified" | "float32" | "float16" | "int32" | "int64" | "bfloat16" | "uint8" | "int8";
        /** @description A linear layer with an activation: y = activation(W x + b), optionally followed by a layer normalization. */
        "attnlens.v1.Dense": {
            /** @description Directory of the weights, relative to the bundle's root. Its `model.safetensors` contains `linear.weight`, shape (out_features, in_features), and if `bias` is set, `linear.bias`, shape (out_features), both in fp32. If `norm_epsilon` is set, also `norm.weight` and `norm.bias`, shape (out_features). */
            path: string;
            /** @description Size of x: the hidden size, or `out_features` of the previous layer. */
            in_features: number;
            /** @description Size of y. For the last layer, this is the embedding size. */
            out_features: number;
            /** @description Whether the layer has a bias b. */
            bias: boolean;
            /** @description Component-wise activation. Always specified in a valid bundle. */
            activation: components["schemas"]["attnlens.v1.Activation"];
            /** @description Whether x is scaled to length 1 first. */
            normalize_input: boolean;
            /** @description Epsilon of the layer normalization of y. If 0, y is not normalized. */
            norm_epsilon: number | null;
        };
        /** @description Request message for EncoderService.Embed. */
        "attnlens.v1.EmbedRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Inputs to embed. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Pooling to use instead of the model's own (`Model.pooling`). The model's dense layers still apply. */
            pooling?: components["schemas"]["attnlens.v1.Pooling"] | null;
            /** @description Whether to scale each embedding to length 1. If unset, the model's own setting. */
            normalize?: boolean | null;
            /** @description Number of leading components to keep, before normalization. If 0, all, or as many as the model's `truncate_dim`. Meant for models trained with Matryoshka representation learning. */
            dimensions?: number | null;
            /** @description Element type of the embeddings: DATA_TYPE_FLOAT32 (default) or DATA_TYPE_FLOAT16. With FLOAT16, a request whose result exceeds 65504 is rejected. Must be unset unless `embedding_type` is EMBEDDING_TYPE_FLOAT. */
            data_type?: components["schemas"]["attnlens.v1.DataType"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /** @description Quantization of the embeddings. Defaults to EMBEDDING_TYPE_FLOAT. */
            embedding_type?: components["schemas"]["attnlens.v1.EmbeddingType"] | null;
            /** @description Minimum and maximum of each component for EMBEDDING_TYPE_INT8 and EMBEDDING_TYPE_UINT8, DATA_TYPE_FLOAT32, shape (2, E). If unset, `Manifest.embedding_ranges`, which require the model's own pooling, normalization and dimensions. A request without any ranges is rejected, because ranges computed from its inputs would make a result depend on the other inputs. */
            ranges?: components["schemas"]["attnlens.v1.Tensor"] | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Embed. */
        "attnlens.v1.EmbedResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Embeddings of shape (N, E). E is `EmbedRequest.dimensions`, or `Model.embedding_size` if that is 0. With EMBEDDING_TYPE_BINARY and EMBEDDING_TYPE_UBINARY, of shape (N, ceil(E / 8)). */
            embeddings?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Token counts of each input. */
            usages: components["schemas"]["attnlens.v1.Usage"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
            /** @description Minimum and maximum of each component, shape (2, E), DATA_TYPE_FLOAT32. Set for EMBEDDING_TYPE_INT8 and EMBEDDING_TYPE_UINT8. Only compare quantized embeddings that have the same ranges. */
            ranges?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /**
         * @description Quantization of an embedding with components x, after pooling, truncation and normalization. The results equal those of `quantize_embeddings` in sentence-transformers. For the integer types, component x has the range from `min` to `max` and the level q = floor(255 (x - min) / (max - min)), clipped to 0 to 255. If `max` equals `min`, the step between levels is 1. An embedding that is not finite is rejected.
         *
         *     - `unspecified`: Same as EMBEDDING_TYPE_FLOAT.
         *     - `float`: Not quantized.
         *     - `int8`: q - 128, DATA_TYPE_INT8.
         *     - `uint8`: q, DATA_TYPE_UINT8.
         *     - `binary`: The bytes of EMBEDDING_TYPE_UBINARY minus 128, DATA_TYPE_INT8.
         *     - `ubinary`: One bit per component, 1 if x > 0. DATA_TYPE_UINT8, shape (N, ceil(E / 8)). The first component is the most significant bit of the first byte. Unused bits of the last byte are 0.
         * @enum {string}
         */
        "attnlens.v1.EmbeddingType": "unspecified" | "float" | "int8" | "uint8" | "binary" | "ubinary";
        /** @description Request message for EncoderService.Encode. */
        "attnlens.v1.EncodeRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Inputs to encode. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Whether to return the token vectors of the last layer. They are also returned if `attention` is empty. */
            last_hidden_state?: boolean | null;
            /** @description Attention to return, at most `Limits.max_attention_queries` queries. All queries share one run of the model. */
            attention?: components["schemas"]["attnlens.v1.AttentionQuery"][] | null;
            /** @description Element type of vectors and attention: DATA_TYPE_FLOAT32 (default) or DATA_TYPE_FLOAT16. With FLOAT16, a request whose result exceeds 65504 is rejected. */
            data_type?: components["schemas"]["attnlens.v1.DataType"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Encode. */
        "attnlens.v1.EncodeResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Result of each input. */
            results: components["schemas"]["attnlens.v1.EncodedText"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
        };
        /** @description Request message for EncoderService.EncodeStream. It has the fields of EncodeRequest. */
        "attnlens.v1.EncodeStreamRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Inputs to encode. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Whether to return the token vectors of the last layer. They are also returned if `attention` is empty. */
            last_hidden_state?: boolean | null;
            /** @description Attention to return, at most `Limits.max_attention_queries` queries. All queries share one run of the model. */
            attention?: components["schemas"]["attnlens.v1.AttentionQuery"][] | null;
            /** @description Element type of vectors and attention, see `EncodeRequest.data_type`. */
            data_type?: components["schemas"]["attnlens.v1.DataType"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.EncodeStream: one part of the result of one input. */
        "attnlens.v1.EncodeStreamResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. Set with `text`. */
            model_version: string;
            /** @description Index of the input in the request. */
            input_index: number;
            /** @description First part of each input: everything but attention. */
            text?: components["schemas"]["attnlens.v1.EncodedText"];
            /** @description One layer of one query, or the combined layers of a reduction. Parts are sorted by query, then by layer in the requested order. */
            attention?: components["schemas"]["attnlens.v1.AttentionResult"];
            /** @description Number of parts with `attention` that follow for this input. Set with `text`. */
            num_attention_parts: number;
            /** @description Time spent on this input. Set with `text`. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. Set with `text`. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
        };
        /** @description Encoding of one input. */
        "attnlens.v1.EncodedText": {
            /** @description The T tokens that the model received. */
            tokens: components["schemas"]["attnlens.v1.Token"][];
            /** @description Token counts. */
            usage?: components["schemas"]["attnlens.v1.Usage"];
            /** @description Token vectors of the last layer, shape (T, D). Set if requested. */
            last_hidden_state?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Result of each query, in the order of the request. Empty in a stream. */
            attention: components["schemas"]["attnlens.v1.AttentionResult"][];
        };
        /** @description Comparison of the graphs in one engine with the PyTorch encoder. The engine runs them like a server does: embeddings or the logits of a classifier in one precision, other graphs in fp32. */
        "attnlens.v1.EngineCheck": {
            /** @description Engine, by package name, such as `openvino`. */
            engine: string;
            /** @description Version of the package. */
            version: string;
            /** @description Precision of embeddings or logits. */
            precision: components["schemas"]["attnlens.v1.Precision"];
            /** @description Device in the engine's notation, such as `CPU`. */
            device: string;
            /** @description Processor name, as reported by the engine. */
            processor: string;
            /** @description Whether all gates passed. If not, servers refuse to start with this engine and precision. */
            passed: boolean;
            /** @description Number of input shapes in the grid. */
            num_cases: number;
            /** @description Number of real texts of all kinds. 0 if the bundle has no tokenizer. */
            num_texts: number;
            /** @description Limits and measured values. */
            gates: components["schemas"]["attnlens.v1.Gate"][];
            /** @description Maximum errors of each role of each graph. */
            figures: components["schemas"]["attnlens.v1.ParityFigure"][];
        };
        /**
         * @description Unit of scores.
         *
         *     - `unspecified`: Same as EXPLAIN_LEVEL_TOKENS.
         *     - `tokens`: Tokens.
         *     - `words`: Words: the sum over the tokens of a text with the same `Token.word_index`. A prompt is part of the text after it. Each special token is a separate word. Not available for `TokenIds`, which have no words.
         * @enum {string}
         */
        "attnlens.v1.ExplainLevel": "unspecified" | "tokens" | "words";
        /**
         * @description Method that scores the tokens of a text. docs/explanations.md has the formulas. "Ranking only" methods order tokens, but their scores do not add up to the target: `TokenScores.baseline` and `TokenScores.expected_sum` are unset.
         *
         *     - `unspecified`: In a request, EXPLAIN_METHOD_CONTRIBUTIONS.
         *     - `contributions`: Contribution of each input token, with attention weights, norm deviations and activation ratios held constant. Scores and baseline add up to the target. Needs the contributions graph.
         *     - `output_share`: Contribution of each token vector of the last layer to the pooled vector. Scores add up to the target, without a baseline. A token vector already depends on the whole text. Not available for max pooling or with dense layers.
         *     - `leave_one_out`: Decrease of the target if the token is masked out of attention and pooling; ids and positions of the others stay the same. Takes one run of the model per token. NaN for special tokens, and if no token would be left to pool. Ranking only.
         *     - `rollout`: Attention rollout: the matrix product over layers of 0.5 A + 0.5 I, where A is the mean over heads. Rows are weighted like the tokens in pooling, or equally for max pooling. Sums to 1 for any target. Ranking only.
         *     - `received_attention`: Attention that the token receives from all tokens in the last layer, averaged over heads. Sums to T for any target. Ranking only.
         *     - `contribution_norm`: |c(t)| / |p|, where c(t) is the part of the embedding p that EXPLAIN_METHOD_CONTRIBUTIONS attributes to token t. The score of a word is the norm of the sum of its tokens' vectors. Independent of the target. Takes one run of the contributions graph per component of p, which counts towards `Limits.max_computed_tokens`. Ranking only.
         * @enum {string}
         */
        "attnlens.v1.ExplainMethod": "unspecified" | "contributions" | "output_share" | "leave_one_out" | "rollout" | "received_attention" | "contribution_norm";
        /** @description Request message for EncoderService.Explain. The explained number is the target d . p / |p|, where p is the embedding that Embed returns for the same fields. Normalizing p does not change the target. For a classifier, it is a logit or the difference of two logits, see `label`. Explanations are always computed in fp32, independent of `Model.precision`. */
        "attnlens.v1.ExplainRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Inputs to explain. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Whether to truncate inputs of more than `Model.max_tokens` tokens, including those of `to` and `contrast`. If false, they are rejected with INPUT_TOO_LONG. If not set, they are rejected unless the server was started with --auto-truncate. */
            truncate?: boolean | null;
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Pooling, see `EmbedRequest.pooling`. */
            pooling?: components["schemas"]["attnlens.v1.Pooling"] | null;
            /** @description Number of leading components to keep, see `EmbedRequest.dimensions`. */
            dimensions?: number | null;
            /** @description d = p / |p|. The target is 1. */
            own_embedding?: components["schemas"]["attnlens.v1.OwnEmbedding"] | null;
            /** @description d itself, DATA_TYPE_FLOAT32, with one component per dimension of the embedding. It is not normalized, so the target scales with |d|. A direction whose scores overflow float32 is rejected with INVALID_FIELD. */
            direction?: components["schemas"]["attnlens.v1.Tensor"] | null;
            /** @description d = q / |q|, where q is the embedding of this input. The target is the cosine of p and q. */
            to?: components["schemas"]["attnlens.v1.Input"] | null;
            /** @description Difference of two normalized embeddings. The target is the difference of two cosines. */
            contrast?: components["schemas"]["attnlens.v1.Contrast"] | null;
            /** @description Label of a classifier. The target is its logit, or the difference of two logits. */
            label?: components["schemas"]["attnlens.v1.LabelTarget"] | null;
            /** @description Prompt for the inputs of `to` and `contrast`. If unset, the model's default prompt, if there is one. */
            target_prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Methods to compute, without duplicates. If empty, EXPLAIN_METHOD_CONTRIBUTIONS. */
            methods?: components["schemas"]["attnlens.v1.ExplainMethod"][] | null;
            /** @description Unit of the scores. Defaults to tokens. */
            level?: components["schemas"]["attnlens.v1.ExplainLevel"] | null;
            /** @description Whether to return the contribution of each head. Needs EXPLAIN_METHOD_CONTRIBUTIONS. */
            head_contributions?: boolean | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Explain. */
        "attnlens.v1.ExplainResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Explanation of each input. */
            results: components["schemas"]["attnlens.v1.Explanation"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used, also for the embeddings of `to` and `contrast`. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
        };
        /** @description Explanation of one input. */
        "attnlens.v1.Explanation": {
            /** @description The T tokens that the model received. */
            tokens: components["schemas"]["attnlens.v1.Token"][];
            /** @description Token counts. */
            usage?: components["schemas"]["attnlens.v1.Usage"];
            /** @description Word index of each token. Set with EXPLAIN_LEVEL_WORDS, otherwise empty. */
            unit_ids: number[];
            /** @description The target, d . p / |p|, or the logit or difference of logits of a classifier. */
            target_value: number | null;
            /** @description Scores of each method, in the order of the request. */
            scores: components["schemas"]["attnlens.v1.TokenScores"][];
            /** @description Contribution of each head to the target through its output, shape (L, H). Set if requested. The contributions do not add up to the target, because the output of a head depends on the heads of earlier layers. */
            head_contributions?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Contributions by the source of the tokens. Set for classifiers with EXPLAIN_METHOD_CONTRIBUTIONS. */
            sums_by_source?: components["schemas"]["attnlens.v1.SourceSums"];
        };
        /** @description Faithfulness of a method: Spearman's rank correlation of its scores with leave-one-out, averaged over texts. Measured by `attnlens export` on its own sentences, or by `attnlens check --faithfulness`, towards each text's own embedding, or for the highest logit of a classifier. It does not apply to other targets, such as similarities. */
        "attnlens.v1.Faithfulness": {
            /** @description Method. Unspecified for a control, see `control`. */
            method: components["schemas"]["attnlens.v1.ExplainMethod"];
            /** @description Mean rank correlation, from -1 to 1. */
            rank_correlation: number | null;
            /** @description Number of texts measured. */
            num_texts: number;
            /** @description How much more the embedding moves, as 1 - cosine, when the 10 to 50 % of tokens with the highest scores are left out than when those with the lowest scores are. For a classifier, how much more its highest logit decreases. NaN if not measured. */
            deletion_difference: number | null;
            /** @description Name of a baseline ranking that explains nothing: `random numbers` or `length of the token`. Empty for a method. */
            control: string;
            /** @description Lower bound of the 95 % bootstrap confidence interval of `rank_correlation` over texts. Unset in bundles exported before the interval was stored. */
            interval_low?: number | null;
            /** @description Upper bound of the interval. */
            interval_high?: number | null;
        };
        /** @description A limit of the parity check and the measured value. */
        "attnlens.v1.Gate": {
            /** @description Id of the graph. */
            graph: string;
            /** @description Output that was compared. */
            role: components["schemas"]["attnlens.v1.OutputRole"];
            /** @description Quantity that the gate limits. */
            kind: components["schemas"]["attnlens.v1.GateKind"];
            /** @description The limit: a lower limit for cosines and rank agreement, otherwise an upper limit. Equal values pass. */
            limit: number | null;
            /** @description The measured value. */
            value: number | null;
            /** @description Kind of text, such as `sentences`, if the gate is only about texts of this kind. */
            text_kind: string;
        };
        /**
         * @description Quantity that a gate limits.
         *
         *     - `unspecified`: Never in a valid bundle.
         *     - `max_abs_error`: Maximum of |ONNX - PyTorch fp32|. If the rounding error of fp32 is large, the limit is a multiple of that error: the maximum of |PyTorch fp32 - PyTorch float64| for the same input. For the contributions of tokens and heads, the reference is PyTorch's gradient, and errors are divided by |d|.
         *     - `min_cosine`: Minimum cosine between a vector and the same vector in fp32.
         *     - `mean_cosine`: Mean of these cosines.
         *     - `max_fp16_value`: Maximum magnitude of any fp16 value. The limit is 65504.
         *     - `max_batch_difference`: Maximum difference between a text alone and the same text in a batch.
         *     - `max_incompleteness`: Maximum of |d . p - sum| / (|d| |p|), where the sum is that of scores and baseline. For head contributions, it is compared with the change of the sum when head gates are closed.
         *     - `max_repeat_difference`: Maximum difference between runs of a graph on the same input with the same number of threads. The limit is 0.
         *     - `min_rank_agreement`: Kendall's rank correlation of logits with those in fp32, over the documents of each query, or over the texts of a kind for each label.
         *     - `max_logit_error`: Maximum of |logit - logit in fp32|, relative to the standard deviation of the logits in fp32.
         * @enum {string}
         */
        "attnlens.v1.GateKind": "unspecified" | "max_abs_error" | "min_cosine" | "mean_cosine" | "max_fp16_value" | "max_batch_difference" | "max_incompleteness" | "max_repeat_difference" | "min_rank_agreement" | "max_logit_error";
        /** @description Response message for EncoderService.GetModel. */
        "attnlens.v1.GetModelResponse": {
            /** @description The model. */
            model?: components["schemas"]["attnlens.v1.Model"];
        };
        /** @description An output of a graph. Readers must ignore outputs with an unknown role or layout. */
        "attnlens.v1.GraphOutput": {
            /** @description Name, element type and axes. */
            value?: components["schemas"]["attnlens.v1.ValueInfo"];
            /** @description Meaning. */
            role: components["schemas"]["attnlens.v1.OutputRole"];
            /** @description Layer index. Unset if the output belongs to no layer. */
            layer?: number;
            /** @description Axes. */
            layout: components["schemas"]["attnlens.v1.OutputLayout"];
            /** @description Number of heads. 0 if the output has no head axis. */
            num_heads: number;
            /** @description Sum of each row. For bands and blocks, the sum after conversion to dense weights. */
            row_sum: components["schemas"]["attnlens.v1.RowSum"];
            /** @description Sliding window and global tokens. */
            band?: components["schemas"]["attnlens.v1.Band"];
            /** @description Blocks of tokens. */
            block_table?: components["schemas"]["attnlens.v1.BlockTable"];
        };
        /** @description One input of the model. */
        "attnlens.v1.Input": string | {
            /** @description A text. The server tokenizes it and adds special tokens. */
            text?: string | null;
            /** @description Two texts that the model reads as one input. The server adds special tokens around and between them. */
            text_pair?: components["schemas"]["attnlens.v1.TextPair"] | null;
            /** @description Token ids, used unchanged. They must include the special tokens. */
            token_ids?: components["schemas"]["attnlens.v1.TokenIds"] | null;
        };
        /** @description Selects a label of a classifier. */
        "attnlens.v1.Label": {
            /** @description Index in `Classifier.labels`. */
            index?: number | null;
            /** @description Element of `Classifier.labels`. Rejected with INVALID_FIELD if several labels have this name. */
            name?: string | null;
        };
        /** @description Explains a logit of a classifier, or why its logit is higher than that of another label. */
        "attnlens.v1.LabelTarget": {
            /** @description Label whose logit is explained. If unset, the only label of a reranker. */
            label?: components["schemas"]["attnlens.v1.Label"] | null;
            /** @description Label whose logit is subtracted. If unset, none. */
            rather_than?: components["schemas"]["attnlens.v1.Label"] | null;
        };
        /** @description Attention of one layer. */
        "attnlens.v1.LayerInfo": {
            /** @description Attention mechanism, by its name in the encoder's configuration, such as `softmax` or `disentangled`. Future versions may add names. */
            attention: string;
            /** @description Number of query heads. */
            num_heads: number;
            /** @description Number of key and value heads. */
            num_key_value_heads: number;
            /** @description Size of a head. */
            head_size: number;
            /** @description Maximum distance between a token and one that it attends to. 0 if unlimited. */
            window_radius: number;
        };
        /**
         * @description How to combine the selected layers.
         *
         *     - `unspecified`: Same as LAYER_REDUCTION_NONE.
         *     - `none`: Return each layer.
         *     - `mean`: Mean over layers, with a layer axis of length 1. A stream sends it as one part.
         *     - `rollout`: Attention rollout (Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928): the product over the selected layers of r I + (1 - r) A, where A is the mean over the selected heads. Later layers are on the left. The layer and head axes have length 1; a stream sends the result as one part. Needs ROW_SUM_ONE, and a view that is unspecified or ATTENTION_VIEW_HEAD_MEAN.
         * @enum {string}
         */
        "attnlens.v1.LayerReduction": "unspecified" | "none" | "mean" | "rollout";
        /** @description Limits of a server. A request that exceeds a limit is rejected with a message that names it. */
        "attnlens.v1.Limits": {
            /** @description Maximum number of inputs per request. */
            max_inputs_per_request: number;
            /** @description Maximum size of a text in UTF-8 bytes, including its prompt. For a pair, of both texts together. */
            max_text_bytes: number;
            /** @description Maximum number of inputs that are queued or running over all requests. Inputs for attention and inputs for embeddings are counted separately. */
            max_concurrent_inputs: number;
            /** @description Maximum number of tokens in a batch, including padding. */
            max_batch_tokens: number;
            /**
             * Format: int64
             * @description Maximum size of a response message in bytes.
             */
            max_response_bytes: number;
            /** @description Maximum total size of the texts in a request in UTF-8 bytes, including prompts. */
            max_request_text_bytes: number;
            /**
             * Format: int64
             * @description Maximum size of a request message in bytes.
             */
            max_request_bytes: number;
            /** @description Maximum number of queries in `EncodeRequest.attention`. */
            max_attention_queries: number;
            /**
             * Format: int64
             * @description Maximum compute cost of a request in computed tokens, in addition to running each input once. Leave-one-out and PAIR_MATRIX_INTERACTION cost the tokens of all their runs. PAIR_MATRIX_INPUT and contribution norms cost twice the tokens of their runs. A reduction costs as many tokens as the model computes in the same time.
             */
            max_computed_tokens: number;
        };
        /** @description Response message for EncoderService.ListModels. */
        "attnlens.v1.ListModelsResponse": {
            /** @description All models of the server. */
            models: components["schemas"]["attnlens.v1.Model"][];
        };
        /** @description Comparison with PyTorch on inputs that are too long for the parity grid, which ends where attention maps no longer fit into memory. Position tables in the graph are always compared bit for bit, up to the last position. */
        "attnlens.v1.LongContext": {
            /** @description Maximum input length of the encoder, in tokens. */
            max_tokens: number;
            /** @description Longest input at which the hidden states of the embeddings graph were compared, including the grid. */
            hidden_states_tokens: number;
            /** @description max |ONNX - PyTorch fp32| at that length. Unset if the grid reached that length. */
            hidden_states_error?: number | null;
            /** @description Limit on `hidden_states_error`. */
            hidden_states_limit: number | null;
            /** @description Input length of a randomly initialized encoder with one head and the model's position settings. 0 if the attention mechanism does not support one head. */
            probe_tokens: number;
            /** @description max |ONNX - PyTorch fp32| of the hidden states of that encoder. */
            probe_error: number | null;
            /** @description Limit on `probe_error`. */
            probe_limit: number | null;
        };
        /**
         * @description Handling of documents that are too long. A query is never truncated: one that leaves no token for a document is rejected with INPUT_TOO_LONG.
         *
         *     - `unspecified`: Same as LONG_DOCUMENTS_TRUNCATE.
         *     - `truncate`: Remove tokens from the end of the document.
         *     - `split`: Score consecutive parts of the document, each as long as fits, and return the highest logit.
         *     - `reject`: Reject the request with INPUT_TOO_LONG.
         * @enum {string}
         */
        "attnlens.v1.LongDocuments": "unspecified" | "truncate" | "split" | "reject";
        /** @description A model and the server that runs it. */
        "attnlens.v1.Model": {
            /** @description Model name, as used in requests. */
            name: string;
            /** @description SHA-256 of the bundle's manifest, in lower-case hexadecimal. Bundles with the same version return the same results. */
            version: string;
            /** @description Current state. */
            state: components["schemas"]["attnlens.v1.ModelState"];
            /** @description Origin of the weights, see `Manifest.source`. */
            source: string;
            /** @description Commit of the hub repository in `source`. Empty if unknown. */
            source_revision: string;
            /** @description License of the weights. Empty if not stated. */
            weights_license: string;
            /** @description Sizes of the encoder: hidden size, layers, heads, vocabulary. */
            architecture?: components["schemas"]["attnlens.v1.Architecture"];
            /** @description Default conversion of token vectors to embeddings. */
            pooling?: components["schemas"]["attnlens.v1.PoolingDefaults"];
            /** @description Maximum number of tokens per input, including special tokens. */
            max_tokens: number;
            /** @description Default embedding size: `pooling.truncate_dim` if set, otherwise the output size of the last dense layer, or `architecture.hidden_size` if there are no dense layers. */
            embedding_size: number;
            /** @description Prompts by name. */
            prompts: {
                [key: string]: string;
            };
            /** @description Name of the prompt for requests without a prompt. Empty if there is none. */
            default_prompt_name: string;
            /** @description Whether `Input.text_pair` is available. */
            supports_text_pairs: boolean;
            /** @description Precision of embeddings, and of token vectors without attention. Attention is always computed in fp32. */
            precision: components["schemas"]["attnlens.v1.Precision"];
            /** @description Outputs that Encode can return: the token vectors, followed by the attention outputs of each layer. */
            outputs: components["schemas"]["attnlens.v1.GraphOutput"][];
            /** @description Comparison of the graphs with the PyTorch encoder. */
            parity?: components["schemas"]["attnlens.v1.Parity"];
            /** @description Limits of the server. */
            limits?: components["schemas"]["attnlens.v1.Limits"];
            /** @description ONNX Runtime execution providers in use, in order of preference. Empty with another engine. */
            execution_providers: string[];
            /** @description Versions by package name: `attnlens` and the engine's package, and those used by the export with the prefix `export/`. */
            versions: {
                [key: string]: string;
            };
            /** @description Methods available in Explain and Compare. Empty if explanations are not available. */
            explain_methods: components["schemas"]["attnlens.v1.ExplainMethod"][];
            /** @description Matrices available in Compare. */
            pair_matrices: components["schemas"]["attnlens.v1.PairMatrix"][];
            /** @description Faithfulness of the methods. Empty if not measured. */
            faithfulness: components["schemas"]["attnlens.v1.Faithfulness"][];
            /** @description Engine that runs the graphs, by package name: `onnxruntime` or `openvino`. Embeddings can differ between engines in their last bits, or by more in bf16. */
            engine: string;
            /** @description Device in the engine's notation, such as `CPU`. */
            device: string;
            /** @description Comparison of this engine with the PyTorch encoder in `precision`. Unset if not measured, or if `parity` is that comparison. */
            engine_check?: components["schemas"]["attnlens.v1.EngineCheck"];
            /** @description Whether requests with an empty `model` use this model. */
            is_default: boolean;
            /** @description Head of a classifier or reranker, for Classify and Score. Unset for an embedding model. */
            classifier?: components["schemas"]["attnlens.v1.Classifier"];
            /** @description Comparison with the publisher's own pipeline at export. Unset for bundles of versions that did not record it. */
            publisher?: components["schemas"]["attnlens.v1.PublisherComparison"];
            /** @description Chat template into which each text is inserted. Unset if there is none. */
            chat_template?: components["schemas"]["attnlens.v1.ChatTemplate"];
            /** @description Function that compares embeddings. Unset for a classifier. */
            similarity: components["schemas"]["attnlens.v1.Similarity"];
            /** @description Source of the token ids if the export chose, see `Manifest.tokenizer_choice`. */
            tokenizer_choice: string;
        };
        /**
         * @description State of a model on the server.
         *
         *     - `unspecified`: Never sent.
         *     - `loading`: The model is loading.
         *     - `ready`: All methods are available.
         *     - `degraded`: Embeddings and token vectors are available. Attention is not, because its graph is unusable.
         *     - `unloading`: The model completes accepted requests and rejects new ones.
         * @enum {string}
         */
        "attnlens.v1.ModelState": "unspecified" | "loading" | "ready" | "degraded" | "unloading";
        /**
         * @description Axes of an output, with B texts.
         *
         *     - `unspecified`: Never in a valid bundle.
         *     - `per_token`: One row per token: (B, T, D), (B, T, H) for one value per head, or (B, T) for a single value.
         *     - `dense`: One value per head and pair of tokens: (B, H, T, T). The last axis is the key.
         *     - `band`: Weights of a sliding window and of global tokens: (B, H, T, 2G + 2w + 1). See Band.
         *     - `blocks`: Weights between some blocks of tokens: (B, H, T, S * b + 2b). See BlockTable.
         *     - `per_text`: Values per text: (B), (B, C), (B, E) or (B, L, H).
         * @enum {string}
         */
        "attnlens.v1.OutputLayout": "unspecified" | "per_token" | "dense" | "band" | "blocks" | "per_text";
        /**
         * @description Meaning of an output. Shapes have B texts.
         *
         *     - `unspecified`: In a request, OUTPUT_ROLE_ATTENTION_WEIGHTS.
         *     - `last_hidden_state`: Token vectors of the last layer: (B, T, D).
         *     - `attention_weights`: Attention weights of a layer after the softmax: how much token i attends to token j.
         *     - `embedding`: Embeddings (B, E) of the contributions graph, not normalized; its inputs specify the pooling and E. Other graphs have no such output, but gates use this role for embeddings computed according to `Manifest.pooling`.
         *     - `attention_composed`: Weights combined from several heads, used like attention weights. They can be negative, and rows can have any sum.
         *     - `head_gates`: How much each token uses each head of a layer.
         *     - `token_contributions`: Contribution of each token to the dot product of a direction and the embedding: (B, T). See docs/explanations.md.
         *     - `baseline`: Contribution of the encoder's biases to the dot product: (B).
         *     - `head_contributions`: Contribution of each head of each layer to the dot product: (B, L, H).
         *     - `logits`: Logits of a classifier with C labels: (B, C).
         * @enum {string}
         */
        "attnlens.v1.OutputRole": "unspecified" | "last_hidden_state" | "attention_weights" | "embedding" | "attention_composed" | "head_gates" | "token_contributions" | "baseline" | "head_contributions" | "logits";
        /** @description Selects the embedding of each input as its own target. */
        "attnlens.v1.OwnEmbedding": Record<string, never>;
        /**
         * @description Matrix of scores for pairs of tokens: token i of the first text and token j of the second.
         *
         *     - `unspecified`: No matrix.
         *     - `output`: Contribution of each pair of token vectors of the last layer. Adds up to the similarity. Needs no further runs of the model. Not available for max pooling or with dense layers.
         *     - `interaction`: Interaction of leave-one-out effects: s - s(-i) - s(-j) + s(-i-j), where s is the similarity and s(-i) the similarity without token i. Takes one run of the model per token of both texts. NaN where EXPLAIN_METHOD_LEAVE_ONE_OUT is NaN. Does not add up to the similarity.
         *     - `input`: Joint contribution of each pair of input tokens: c(i) . c'(j) / (|p| |p'|), where c(i) is the contribution of token i to the pooled vector p, as in EXPLAIN_METHOD_CONTRIBUTIONS. The matrix, `Comparison.baseline_row`, `baseline_column` and `baseline` add up to the similarity. Takes E + m + 1 runs of the contributions graph, where m is the number of tokens of the shorter text.
         * @enum {string}
         */
        "attnlens.v1.PairMatrix": "unspecified" | "output" | "interaction" | "input";
        /** @description Result of the parity check, which compares each output of each graph with the PyTorch encoder over a grid of batch sizes, input lengths and padding sides. The full table is in `parity/report.json`. */
        "attnlens.v1.Parity": {
            /** @description Whether all gates passed. Servers reject a bundle with a failed gate. */
            passed: boolean;
            /** @description Number of input shapes in the grid. */
            num_cases: number;
            /** @description Limits and measured values. */
            gates: components["schemas"]["attnlens.v1.Gate"][];
            /** @description Maximum errors of each role of each graph. */
            figures: components["schemas"]["attnlens.v1.ParityFigure"][];
            /** @description Errors on inputs that are too long for the grid. Unset if the grid reached the longest input. */
            long_context?: components["schemas"]["attnlens.v1.LongContext"];
        };
        /** @description Maximum errors of one role of one graph over the grid, across all layers, excluding padding. For an fp16 graph, over the short inputs of the grid and, if the bundle has a tokenizer, some sentences. */
        "attnlens.v1.ParityFigure": {
            /** @description Id of the graph. */
            graph: string;
            /** @description Output that was compared. */
            role: components["schemas"]["attnlens.v1.OutputRole"];
            /** @description Maximum of |ONNX - PyTorch fp32|. */
            max_abs_error: number | null;
            /** @description Maximum of |ONNX - PyTorch float64|. */
            max_abs_error_float64: number | null;
            /** @description Maximum of |PyTorch fp32 - PyTorch float64|: the rounding error of fp32 itself. */
            torch_max_abs_error_float64: number | null;
            /** @description Mean of |ONNX - PyTorch fp32|. */
            mean_abs_error: number | null;
            /** @description Maximum over the cases of the 99th percentile of |ONNX - PyTorch fp32|. */
            p99_abs_error: number | null;
            /** @description Minimum cosine between rows of ONNX and PyTorch fp32. */
            min_cosine: number | null;
            /** @description Longest input compared, in tokens, including padding. It can be less than `Architecture.max_position_embeddings` if attention maps become too large to compare. */
            longest_input_tokens: number;
            /** @description Maximum magnitude of any fp16 value of an fp16 graph, including padding. The largest finite fp16 value is 65504. 0 for other graphs. */
            max_fp16_value: number | null;
        };
        /**
         * @description Operation that combines the token vectors h(1) ... h(T) of a text into one vector. It includes special tokens and, unless PoolingDefaults.exclude_prompt is set, those of a prompt. It never includes padding.
         *
         *     - `unspecified`: In a request, the model's own pooling.
         *     - `mean`: Mean: sum of h(t) / T.
         *     - `cls`: Vector of the first token: h(1).
         *     - `max`: Component-wise maximum.
         *     - `last_token`: Vector of the last token: h(T).
         *     - `weighted_mean`: Mean weighted by position: sum of t h(t) / sum of t, with t from 1 to T.
         *     - `mean_sqrt_length`: Sum of h(t) / sqrt(T).
         * @enum {string}
         */
        "attnlens.v1.Pooling": "unspecified" | "mean" | "cls" | "max" | "last_token" | "weighted_mean" | "mean_sqrt_length";
        /** @description Default conversion of token vectors to an embedding: pool, apply the `dense` layers in order, and scale to length 1 if `normalize` is set. The last dense layer of a classifier returns its logits. */
        "attnlens.v1.PoolingDefaults": {
            /** @description Pooling. Always specified in a valid bundle. */
            pooling: components["schemas"]["attnlens.v1.Pooling"];
            /** @description Whether embeddings are scaled to length 1. */
            normalize: boolean;
            /** @description Layers applied to the pooled vector, for any pooling that a request selects. */
            dense: components["schemas"]["attnlens.v1.Dense"][];
            /** @description Whether pooling excludes the prompt and the tokens before it. These are the first n tokens, where n is the number of tokens of the prompt by itself, without a special token at its end. The other tokens keep their position t. */
            exclude_prompt: boolean;
            /** @description Default number of embedding components (`truncate_dim` of sentence-transformers). If 0, all. */
            truncate_dim: number;
        };
        /**
         * @description Number format of a computation.
         *
         *     - `unspecified`: Not specified.
         *     - `fp32`: fp32.
         *     - `fp16`: Matrix multiplications in fp16; norms, sums and softmax in fp32.
         *     - `int8`: Matrix multiplications listed in `Graph.quantization` in int8, everything else in fp32.
         *     - `bf16`: The fp32 graph, with matrix multiplications and other operations of the engine's choice in bf16. No graph of a bundle has this precision.
         * @enum {string}
         */
        "attnlens.v1.Precision": "unspecified" | "fp32" | "fp16" | "int8" | "bf16";
        /** @description A string that is prepended, unchanged, to each text and to the first text of each pair. Its bytes and tokens count towards all limits on a text. If a request has no prompt, the model's default prompt is used, if there is one.  `TokenIds` can't have a prompt: a request with both is rejected, and the default prompt is not applied to them. */
        "attnlens.v1.Prompt": {
            /** @description Name of one of the model's prompts (`Model.prompts`). */
            name?: string | null;
            /** @description The prompt itself. If empty, no prompt is used, not even the default prompt. */
            text?: string | null;
        };
        /** @description Comparison of the bundle with the pipeline that its publisher uses, from text to the final result. The export stops if a result differs. */
        "attnlens.v1.PublisherComparison": {
            /** @description Package of the pipeline: `sentence-transformers` or `transformers`. Empty if nothing was compared. */
            library: string;
            /** @description Versions of the packages, by name. */
            versions: {
                [key: string]: string;
            };
            /** @description Comparisons in the order of the pipeline. */
            figures: components["schemas"]["attnlens.v1.PublisherFigure"][];
            /** @description Results that were not compared, as `RESULT: REASON`. If nothing was compared, the first entry is the reason. */
            not_compared: string[];
            /** @description Number of tokens of the longest text whose vectors were compared. Token ids are compared up to `max_tokens`. */
            longest_tokens: number;
        };
        /** @description Comparison of one kind of result over all texts with the same prompt. */
        "attnlens.v1.PublisherFigure": {
            /** @description Result: `prompts`, `default prompt`, `similarity` (its function), `token ids`, `token types`, `hidden states`, `embeddings`, `similarities` (numbers), `logits`, `scores` or `labels`. A prompt other than the default follows in parentheses, as in `token ids (prompt query)`. */
            result: string;
            /** @description Number of texts or pairs. */
            num_texts: number;
            /** @description Maximum difference between the bundle and the pipeline. 0 for results that must be equal. Differences between embeddings are divided by the larger of 1 and their length. */
            max_abs_error: number | null;
            /** @description Limit on `max_abs_error`: a multiple of the rounding error of fp32. 0 for results that must be equal. */
            limit: number | null;
        };
        /** @description Replaces the weights by statistics. Set `received`, `entropy` or both. */
        "attnlens.v1.RowStatistics": {
            /** @description Return the attention that each unit receives: its column sum over the rows of all units that are not special, including its own row. Can't be combined with `rows`. For `TokenIds`, `all_rows` must be set too. */
            received?: boolean | null;
            /** @description Return the entropy of each row in nats, - sum A ln A with 0 ln 0 = 0. Needs ROW_SUM_ONE. */
            entropy?: boolean | null;
            /** @description Include the rows of special tokens in `received`. */
            all_rows?: boolean | null;
        };
        /**
         * @description Sum of each row of an output.
         *
         *     - `unspecified`: Not defined: the rows are not weights.
         *     - `one`: 1, excluding padding.
         *     - `gate`: The gate of the token and head.
         *     - `unbounded`: Any number.
         * @enum {string}
         */
        "attnlens.v1.RowSum": "unspecified" | "one" | "gate" | "unbounded";
        /** @description Options of the explanations of scores. */
        "attnlens.v1.ScoreExplanation": {
            /** @description Unit of the contributions. Defaults to tokens. */
            level?: components["schemas"]["attnlens.v1.ExplainLevel"] | null;
        };
        /** @description Request message for EncoderService.Score. Set either `query` and `documents`, or `pairs`. */
        "attnlens.v1.ScoreRequest": {
            /** @description Model name. If empty, the server's default model. */
            model?: string | null;
            /** @description Query, the first text of each input. */
            query?: string | null;
            /** @description Documents, the second text of each input. At least 1 and at most `Limits.max_inputs_per_request`. Equal documents are computed once. */
            documents: string[];
            /** @description Pairs of a query and a document. At least 1 and at most `Limits.max_inputs_per_request`. */
            pairs: components["schemas"]["attnlens.v1.TextPair"][];
            /** @description Number of results to return, those with the highest logits. If 0, all. Must be 0 with `pairs`. */
            top_n?: number | null;
            /** @description What to do with a document that does not fit into the model's input with its query. Defaults to truncating it. */
            long_documents?: components["schemas"]["attnlens.v1.LongDocuments"] | null;
            /** @description Maximum number of tokens of a document, without special tokens. If 0, as many as fit into the model's input. */
            max_tokens_per_document?: number | null;
            /** @description Prompt that is prepended to each query. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Function from logits to scores: ACTIVATION_IDENTITY or ACTIVATION_SIGMOID. Defaults to `Classifier.activation`. It does not change the order of the results. */
            activation?: components["schemas"]["attnlens.v1.Activation"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
            /** @description Set to explain each result: the contributions of the tokens of query and document to the logit. */
            explanation?: components["schemas"]["attnlens.v1.ScoreExplanation"] | null;
            /**
             * @description Format of tensors in the response.
             * @default lists
             * @enum {unknown}
             */
            arrays: "lists" | "base64" | null;
        };
        /** @description Response message for EncoderService.Score. */
        "attnlens.v1.ScoreResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description With `query`, sorted by descending logit, equal logits by index. With `pairs`, in the order of the request. */
            results: components["schemas"]["attnlens.v1.ScoreResult"][];
            /** @description Function that computed the scores from the logits. */
            activation: components["schemas"]["attnlens.v1.Activation"];
            /** @description Token counts of the input of each document or pair, in the order of the request. For a document in several parts, their sum. */
            usages: components["schemas"]["attnlens.v1.Usage"][];
            /** @description Time spent on the call. */
            timings?: components["schemas"]["attnlens.v1.Timings"];
            /** @description Engine and precision used. */
            computation?: components["schemas"]["attnlens.v1.Computation"];
        };
        /** @description Score of one document or pair. */
        "attnlens.v1.ScoreResult": {
            /** @description Index in `documents` or `pairs`. */
            index: number;
            /** @description The activation of the logit, computed in float64. */
            score: number | null;
            /** @description Logit of the model. */
            logit: number | null;
            /** @description Number of parts of the document that were scored. 1 unless LONG_DOCUMENTS_SPLIT applied. */
            num_parts: number;
            /** @description Index of the part with the highest logit. */
            part: number;
            /** @description EXPLAIN_METHOD_CONTRIBUTIONS of this part's tokens to the logit, computed in fp32. Its `target_value` therefore differs from `logit` by rounding, or more if `Model.precision` is lower. Set if requested. */
            explanation?: components["schemas"]["attnlens.v1.Explanation"];
        };
        /**
         * @description Function that compares two embeddings.
         *
         *     - `unspecified`: Cosine, or none for a classifier.
         *     - `cosine`: Cosine.
         *     - `dot`: Dot product.
         * @enum {string}
         */
        "attnlens.v1.Similarity": "unspecified" | "cosine" | "dot";
        /** @description Sums of EXPLAIN_METHOD_CONTRIBUTIONS over the tokens of each source. Together, they add up to the target. */
        "attnlens.v1.SourceSums": {
            /** @description Tokens of the text, or of the first text of a pair: the query of a reranker. */
            text: number | null;
            /** @description Tokens of the second text: the document of a reranker. */
            second_text: number | null;
            /** @description Tokens of the prompt. */
            prompt: number | null;
            /** @description Special tokens. */
            special_tokens: number | null;
            /** @description Tokens of an input that was sent as token ids. */
            token_ids: number | null;
            /** @description `TokenScores.baseline`. */
            baseline: number | null;
        };
        /** @description Weights that reach a threshold, as a compressed sparse row matrix with layers * heads * R rows in row-major order. Row n consists of the entries from `indptr[n]` to `indptr[n + 1] - 1`, sorted by column. */
        "attnlens.v1.SparseWeights": {
            /** @description Start of each row, DATA_TYPE_INT32, shape (layers * heads * R + 1). */
            indptr?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Column indices, DATA_TYPE_INT32, one per entry. */
            indices?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Weights, one per entry. */
            values?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Sum of the entries of each row, shape (layers, heads, R). */
            kept_mass?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /**
         * @description Handling of the rows and columns of special tokens (TOKEN_SOURCE_SPECIAL).
         *
         *     - `unspecified`: Same as SPECIAL_TOKENS_KEEP.
         *     - `keep`: Keep special tokens.
         *     - `drop`: Remove special tokens and divide each row by its remaining sum. `AttentionResult.special_token_mass` is the weight removed from each row, often more than half. A row that only attends to special tokens becomes 0. Needs ROW_SUM_ONE. Not available for `TokenIds`, whose special tokens are unknown.
         * @enum {string}
         */
        "attnlens.v1.SpecialTokens": "unspecified" | "keep" | "drop";
        /** @description Quantizes each weight A, from 0 to 1, to round(255 sqrt(A)). The square root preserves small weights. Needs ROW_SUM_ONE or ROW_SUM_GATE. */
        "attnlens.v1.SqrtUint8": Record<string, never>;
        /** @description A dense array. `data` can be read without a copy, for example with `numpy.frombuffer(data, "<f4").reshape(shape)`. */
        "attnlens.v1.Tensor": components["schemas"]["NestedList"] | {
            /** @description Element type. */
            data_type: components["schemas"]["attnlens.v1.DataType"];
            /** @description Length of each axis, outermost first. */
            shape: number[];
            /** @description Elements in row-major order, each little-endian, without padding. The length is the product of `shape` times the element size. */
            data: string;
        };
        /** @description Strings around a text: before_prompt + prompt + before_text + text + after_text. */
        "attnlens.v1.TextFrame": {
            /** @description Before the prompt. Empty without a prompt. */
            before_prompt: string;
            /** @description Before the text. */
            before_text: string;
            /** @description After the text. */
            after_text: string;
        };
        /** @description Two texts, for models with `Model.supports_text_pairs`. Limits apply to both texts together. Truncation removes tokens one at a time from the longer text. */
        "attnlens.v1.TextPair": {
            /** @description First text. A prompt is prepended to it. */
            first?: string | null;
            /** @description Second text. */
            second?: string | null;
        };
        /** @description Keeps weights greater than or equal to a threshold. */
        "attnlens.v1.Threshold": {
            /** @description Greater than 0 and at most 1. */
            threshold?: number | null;
        };
        /** @description Time spent in each stage of a call. If its inputs ran in several batches, each value is the maximum over the batches. */
        "attnlens.v1.Timings": {
            /** @description Tokenization. */
            tokenize?: number;
            /** @description Waiting for a batch. */
            queue?: number;
            /** @description Running the batch. */
            compute?: number;
        };
        /** @description A token and its offsets. Offsets are relative to the token's source: byte 0 is the first byte of the text, even if a prompt or another text precedes it. They are 0 for TOKEN_SOURCE_SPECIAL and TOKEN_SOURCE_IDS. */
        "attnlens.v1.Token": {
            /** @description Id in the vocabulary. */
            id: number;
            /** @description The tokenizer's spelling, such as `##ing`. */
            text: string;
            /** @description Origin of the token. */
            source: components["schemas"]["attnlens.v1.TokenSource"];
            /** @description Offset of the first byte, in UTF-8. */
            byte_start: number;
            /** @description Offset after the last byte. */
            byte_end: number;
            /** @description Offset of the first character, in Unicode code points. */
            char_start: number;
            /** @description Offset after the last character. */
            char_end: number;
            /** @description Index of the token's word. Numbering starts at 0 in each text of a pair; a prompt and the text after it are numbered together. Unset for TOKEN_SOURCE_SPECIAL and TOKEN_SOURCE_IDS. */
            word_index?: number;
        };
        /** @description A tokenized input. */
        "attnlens.v1.TokenIds": {
            /** @description Token ids from 0 to vocab_size - 1. */
            input_ids?: number[] | null;
            /** @description Token type of each token, from 0 to type_vocab_size - 1. If empty, all are 0. */
            token_type_ids?: number[] | null;
        };
        /** @description Scores of one method for one input. */
        "attnlens.v1.TokenScores": {
            /** @description The method. */
            method: components["schemas"]["attnlens.v1.ExplainMethod"];
            /** @description Score of each token, shape (T), or of each word. */
            values?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Contribution of the encoder's biases, which belongs to no token. Set if scores and baseline add up to the target. */
            baseline?: number | null;
            /** @description Sum of the baseline and of all scores that are not NaN. */
            sum: number | null;
            /** @description The target, which `sum` must equal up to rounding. Unset for methods whose scores do not add up to it. */
            expected_sum?: number | null;
            /** @description `Faithfulness.rank_correlation` of the method. Unset unless it was measured for this kind of question: scores of tokens, not of words, of a text of 5 to 128 tokens without a prompt, towards its own embedding with the default pooling and dimensions, or the highest logit of a classifier's text, or the logit of a reranker's pair. */
            faithfulness?: number | null;
        };
        /**
         * @description Origin of a token.
         *
         *     - `unspecified`: Never sent.
         *     - `special`: Added by the tokenizer, such as `[CLS]`.
         *     - `prompt`: The prompt.
         *     - `text`: The text, or the first text of a pair. Includes a token that starts in the prompt and ends in the text.
         *     - `second_text`: The second text of a pair.
         *     - `ids`: `TokenIds.input_ids`.
         * @enum {string}
         */
        "attnlens.v1.TokenSource": "unspecified" | "special" | "prompt" | "text" | "second_text" | "ids";
        /** @description Request message for EncoderService.Tokenize. */
        "attnlens.v1.TokenizeRequest": {
            /** @description Model name. If empty, the server's default model (`Model.is_default`). */
            model?: string | null;
            /** @description Inputs to tokenize. At least 1 and at most `Limits.max_inputs_per_request`. */
            inputs: components["schemas"]["attnlens.v1.Input"][];
            /** @description Prompt for all inputs. If unset, the model's default prompt, if there is one. */
            prompt?: components["schemas"]["attnlens.v1.Prompt"] | null;
            /** @description Model version (`Model.version`), the full SHA-256. If empty, any version. */
            model_version?: string | null;
        };
        /** @description Response message for EncoderService.Tokenize. */
        "attnlens.v1.TokenizeResponse": {
            /** @description Name of the model that was used. */
            model: string;
            /** @description Version of that model. */
            model_version: string;
            /** @description Tokens of each input. */
            results: components["schemas"]["attnlens.v1.TokenizedText"][];
        };
        /** @description Tokens of one input. They are never truncated. */
        "attnlens.v1.TokenizedText": {
            /** @description Tokens, including special tokens. */
            tokens: components["schemas"]["attnlens.v1.Token"][];
            /** @description Whether the input has more tokens than `Model.max_tokens`. */
            exceeds_max_tokens: boolean;
        };
        /** @description Keeps the largest weights of each row, in descending order. Equal weights are sorted by column. */
        "attnlens.v1.TopK": {
            /** @description Number of weights per row, at least 1. If a row has fewer columns, all weights are returned. */
            k?: number | null;
        };
        /** @description The k largest weights of each row, where k is the smaller of `TopK.k` and U. */
        "attnlens.v1.TopKWeights": {
            /** @description Column indices, DATA_TYPE_INT32, shape (layers, heads, R, k). */
            indices?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Weights in descending order, shape (layers, heads, R, k). */
            values?: components["schemas"]["attnlens.v1.Tensor"];
            /** @description Sum of the other weights of each row, shape (layers, heads, R). */
            remaining_mass?: components["schemas"]["attnlens.v1.Tensor"];
        };
        /** @description Number of tokens used of an input. All counts include special tokens and the tokens of a prompt. */
        "attnlens.v1.Usage": {
            /** @description Number of tokens that the model received. */
            num_tokens: number;
            /** @description Number of tokens before truncation. */
            num_tokens_total: number;
            /** @description Whether the input was truncated. */
            truncated: boolean;
        };
        /** @description An input or output of a graph. */
        "attnlens.v1.ValueInfo": {
            /** @description Name. */
            name: string;
            /** @description Element type. */
            data_type: components["schemas"]["attnlens.v1.DataType"];
            /** @description One entry per axis: a number for a fixed length, or a name for a variable length. */
            axes: string[];
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export type operations = Record<string, never>;
