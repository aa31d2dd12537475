"""Why each near miss of the corpora is one: what its reason has to say, and the line that it has to name.

Written from the programs, not from what the matcher says. `NOTHING_OF_IT` are programs of the corpora that only stand
in the same place as a family: no reason is due for them, and every model is full of them.
"""

from __future__ import annotations

# corpus -> name of the program -> (what the reason says, what stands on the line)
TRUE: dict[str, dict[str, tuple[str, str]]] = {}
NOTHING_OF_IT: dict[str, dict[str, str]] = {}

TRUE["corpus.splade"] = {
    "st_sum": ("sum pooling", "torch.sum(t, dim=1)"),
    "nm_mean_pool": ("sum pooling", ".sum(1)"),
    "nm_last_token": ("one token", "logits[torch.arange("),
    "nm_max_over_batch": ("over the batch", "amax(dim=0)"),
    "nm_logits_returned": ("logits are also returned", "self.decoder(hidden)"),
    "nm_activations_reused_sum": ("sum pooling", "(tokens * keep).sum(1)"),
    "nm_filled_before_the_mask": ("a mask of tokens comes after", "mask.unsqueeze(-1)"),
    "nm_sine_between": ("sin is not monotone", "torch.sin(logits)"),
    "nm_min_pool": ("minimum", "amin(1)"),
    "nm_logsumexp_pool": ("log-sum-exp", "torch.logsumexp("),
    "nm_bge_m3_scatter_max": ("scatter", "torch.scatter("),
}

TRUE["splade_spellings"] = {
    "softmax_over_vocabulary": ("softmax", "logits.softmax(dim=-1)"),
    "log_softmax_over_vocabulary": ("log_softmax", "F.log_softmax(logits"),
    "softmax_over_sequence": ("(softmax) differs by token and", "logits.softmax(dim=1)"),
    "layer_norm_on_logits": ("layer_norm", "F.layer_norm(logits"),
    "centred_over_vocabulary": ("mean", "logits.mean(dim=-1"),
    "centred_over_sequence": ("also read by mean", "logits.mean(dim=1"),
    "tokens_normalised": ("normalize", "F.normalize(tokens(logits)"),
    "logits_in_the_output": ("logits are also returned", "self.decoder(h)"),
    "activations_in_the_output": ("also returned", "weights ="),
    "logit_penalty": ("also read by mean", "logits.mean("),
    "token_saliency_too": ("over the vocabulary", "weights.amax(dim=2)"),
    "mlm_loss_on_the_same_logits": ("also read by cross_entropy", "F.cross_entropy("),
    "hook_keeps_logits": ("also read by sum", "self.decoder.last.sum()"),
    "hook_replaces_logits": ("softmax", "register_forward_hook"),
    "logits_kept_in_an_attribute": ("logits are also returned", "self.last_logits ="),
    "mask_of_tokens_and_terms": ("differs by token and by output", "masked_fill(itself"),
    "gate_of_tokens_and_terms": (
        "two tensors that come from linears",
        "torch.sigmoid(self.gate(h))",
    ),
    "maximum_with_a_prior": ("maximum with a tensor", "torch.maximum(self.decoder(h), prior)"),
    "mean_by_length": ("sum pooling", "weights.sum(dim=1)"),
    "attention_pooled": ("weighted sum over the sequence", "torch.einsum("),
    "temperature_logsumexp": ("log-sum-exp", "torch.logsumexp("),
    "power_mean": ("mean pooling", ".mean(dim=1)"),
    "max_over_vocabulary": ("over the vocabulary", "amax(dim=-1)"),
    "min_over_sequence": ("minimum", "amin(dim=1)"),
    "median_over_sequence": ("median", ".median(dim=1)"),
    "second_largest": ("k-th smallest", ".kthvalue("),
    "mean_of_top_two": ("2 largest", ".topk(2, dim=1)"),
    "argmax_positions": ("only the positions", ".argmax(dim=1)"),
    "cumulative_maximum": ("running maximum", ".cummax(dim=1)"),
    "sliding_window_pool": ("windows", "F.max_pool1d("),
    "projected_and_normalised": ("normalize", "F.normalize(self.out("),
    "weight_per_sequence": ("batched", "torch.bmm(h, self.heads[language])"),
    "gumbel_noise": ("differs by token and by output", "torch.log(-torch.log(uniform))"),
    "dropout_on_logits": ("dropout is active", "F.dropout(logits"),
    "batch_norm_on_logits": ("batch_norm", "F.batch_norm("),
    "integer_logits": ("logits are torch.int64", "amax(dim=1)"),
    "complex_logits": ("are complex", "logits.abs()"),
    "straight_through": ("differs by token and by output", ".detach()"),
    "gradient_rescaled": ("gradient of its own", "Half.apply(logits)"),
    "words_summed_before_max": ("index_add", "words.index_add("),
    "bigram_logits": ("two tensors that come from linears", "logits[:, 1:] + logits[:, :-1]"),
    "cumulative_logits": ("cumsum", "logits.cumsum(dim=1)"),
    "other_weights_where_largest": ("only the positions", "weights.argmax("),
    "last_of_a_sort": ("a sort keeps every position", "torch.sort("),
    "norm_of_infinite_order": ("a norm over the sequence", "vector_norm("),
    "packed_sequences": ("end to end", ".index_reduce("),
    "filled_with_more": ("fills in 9", "torch.where("),
    "small_logits_alone": ("keeps the small values", "torch.where("),
    "either_condition": ("(or_) differs by token and by output", "torch.where("),
    "undefined_times_zero": ("what may be no number", "(logits > 1)"),
    "compared_after_a_write": ("(gt) differs by token and by output", "torch.where("),
}

TRUE["corpus.ffn"] = {
    "encoder_layer_with_dropout": (
        "dropout is active",
        "",
    ),  # in torch's own module: no line of the user's
    "relu_of_the_product": ("mul combines two tensors", "m.gate(x) * m.up(x)"),
    "activations_returned": ("activations are also returned", "h ="),
    "sub_norm": ("rms_norm", "F.rms_norm("),
    "leaky": ("leaky_relu", "F.leaky_relu("),
    "top_k": ("scatter", ".scatter("),
    "residual_inside": ("add combines two tensors", "+ m.gate(x)"),
    "scalar_gate": ("of every token", "[..., :1]"),
    "fake_quantised": ("fake_quantize", "fake_quantize"),
    "lib_bitnet": ("of every token", "torch.rsqrt("),  # a norm, written out in the module
}
NOTHING_OF_IT["corpus.ffn"] = {
    "gelu": "no rectifier",
    "no_down_projection": "one linear",
}

TRUE["ffn_spellings"] = {
    "addmm_of_its_own_activations": ("out of the block itself", "torch.addmm(h, torch.relu(h), d)"),
    "leaky": ("leaky_relu(0.1)", "F.leaky_relu("),
    "hidden_returned": ("activations are also returned", "h ="),
    "norm_between": ("layer_norm", "F.layer_norm("),
    "active_dropout": ("dropout is active", "m.drop("),
    "sum_of_branches": ("add combines two tensors", "+ m.up(x)"),
    "shifted_up": ("relu | add(1.0)", "+ 1.0"),
    "mixed_tokens": ("cumsum", ".cumsum(1)"),
    "two_inputs": ("read different inputs", "m.norm(x)"),
    "clamp_below_zero": ("clamp_min(-1.0)", ".clamp(min=-1.0)"),
    "exp_of_relu": ("relu | exp", "torch.exp("),
    "detached": ("detach()", ".detach()"),
    "relu_attention": ("rectified scores", "torch.relu(q @ k"),
    "dropout_of_each_input": ("read different inputs", "m.drop(x)"),
    "stacked_experts": ("every expert", "torch.bmm(torch.relu("),
    "input_written": ("read different inputs", "(x @ u)"),
    "per_neuron": ("every neuron over the tokens", "h.mean((0, 1))"),
    "softmax_of_relu": ("softmax", ".softmax(-1)"),
    "neuron_shift": ("more than a factor of every neuron", "+ m.scale"),
    "statistic_after_the_scale": ("also read by abs", "h.abs()"),
    "batch_norm_after": ("batch_norm after the activation", "m.bn("),
    "batch_norm_of_the_batch": ("statistics of the batch itself", "m.bn("),
    "learned_threshold": ("threshold (scale) is a tensor", "torch.where("),
    "token_factor_before": ("more than a factor", "F.relu("),
    "token_term": ("a term of every token", "+ p"),
    "batch_norm_of_tokens": ("another axis than the linear's", "F.batch_norm("),
    "statistic_after_a_token_factor": ("also read by abs", "h.abs()"),
}
TRUE["ffn_spellings"] |= {
    "sequences_spread_by_a_mask": ("masked_fill spreads", ".masked_fill("),
    "sequences_spread_by_zeros": ("maximum spreads", "torch.maximum("),
    "halves_of_the_tokens": ("read different inputs", "m.up(x)"),
    "tokens_shifted": ("read different inputs", "m.up(x)"),
    "statistic_of_more_tokens": ("also read by mean", "h.mean()"),
    "statistic_of_more_neurons": ("also read by ne", "h != 0"),
    "statistic_of_each_token_in_another_order": ("also read by mean", "h.mean(-1)"),
    "stacked_third_is_read": ("also read by sum", "h[2].sum()"),
    "stacked_tokens_of_their_own": ("read different inputs", "h[1]"),
    "stacked_tokens_written_in_between": ("changed in place within", "torch.einsum("),
}
NOTHING_OF_IT["ffn_spellings"] = {
    "conv_window": "a convolution that is no linear",
    "conv_stride": "a convolution that is no linear",
    "gelu_block": "no rectifier",
    "silu_gate": "no rectifier",
    "relu_outside": "no rectifier between the linears",
    "negative_assigned_too_late": "no rectifier",
}

TRUE["corpus.scoring"] = {
    "message_passing": ("rows of features", "index_add_(0, s.row, x[s.terms]"),
    "accumulate_into_prior": ("does not start at zero", "q.new_ones(N)"),
    "learnt_document_weights": ("weights are learnt", "self.weights"),
    "postings_and_a_row_to_spare": ("rows that belong to no query", "acc.scatter_add_("),
    "scatter_and_a_row_to_spare": ("rows that belong to no query", "scatter_add_(1, rows"),
    "products_of_eight_bits": ("the products are torch.uint8", "q[:, s.ids]"),
    "weights_of_some_edges": ("no document weights", "index_add_("),
    "embedding_with_padding_idx": ("padding_idx keeps the gradient", "self.weight(self.ids)"),
    "embedding_with_scale_grad_by_freq": ("divides the gradient", "self.weight(self.ids)"),
    "accumulator_kept_in_a_buffer": ("the accumulator is the caller's", "s.scores.index_add_("),
}
NOTHING_OF_IT["corpus.scoring"] = {
    "dense_product": "a dense product",
    "expert_combine": "nothing is gathered",
}

TRUE["scoring_spellings"] = {
    "gathered_weights_reused": ("also read by gt", "(picked > 0)"),
    "into_the_callers_buffer": ("does not start at zero", "(c.lengths * 0.1).index_add_("),
    "rows_of_each_query": ("differ from query to query", "scatter_add(1, rows"),
    "best_term": ("largest contribution is no sum", ".amax(-1)"),
    "prior_accumulated_into": ("does not start at zero", "torch.linspace(0, 1, N).index_add("),
    "saturated_products": ("clamp of the products", ".clamp(max=0.5)"),
    "contributions_returned": ("also returned", "contributions ="),
    "scatter_max": ("only sums are inner products", 'reduce="amax"'),
    "mean_contribution": ("'mean', not added up", "torch.segment_reduce("),
    "learnt_documents": ("weights are learnt", "self.values"),
    "message_passing": ("rows of features", "x[edges[0]] * w[:, None]"),
    "expert_combine": ("rows of features", "(outputs[slots]"),
    "bag_of_words": ("rows of features", "F.embedding_bag("),
    "query_changed_between": ("does not start at zero", "scores.index_add_("),
    "query_by_query_through_vmap": ("torch.func (vmap)", "torch.vmap("),
    "einsum_with_boosts_of_queries": ("differ from query to query", "torch.einsum("),
    "assigned_by_document": ("part of the contributions", "products[:, c.lengths < 2] = 0"),
    "filled_with_one": ("does not start at zero", ".fill_(1.0).index_add_("),
    "clamped_postings": ("changed after they were looked up", ".clamp(max=N - 1)"),
    "trained_on_lists": ("no gradient for the weights", "torch.zeros(B, N).scatter_add("),
    "into_a_row_of_ones": ("does not start at zero", "scores[0].index_add_("),
    "segments_with_a_start": ("start at 1.0", "torch.segment_reduce("),
    "terms_after_a_look_at_the_scores": ("also read by amax", "first.amax(1)"),
    "lists_that_are_clamped_in_place": ("also read by clamp", "docs.clamp_("),
    "no_queries": ("batch of queries is empty", ".sum(-1)"),
    "best_list_of_a_document": ("'amax': only sums", ".scatter_reduce(1, docs"),
}
NOTHING_OF_IT["scoring_spellings"] = {
    "rows_reversed": "a lookup by two coordinates that are not followed",
    "rows_permuted": "a lookup by two coordinates that are not followed",
    "rows_listed": "a lookup by two coordinates that are not followed",
    "rows_shifted": "a lookup by two coordinates that are not followed",
    "rows_doubled": "a lookup by two coordinates that are not followed",
    "rows_repeated_as_a_column": "a lookup by two coordinates that are not followed",
    "document_lengths": "no query takes part",
}

TRUE["corpus.entmax"] = {
    "pkg_entmax15_dropout": ("dropout is active", "F.dropout(p"),
    "miss_sparsity_statistics": ("also read by eq", "(p == 0)"),
    "miss_mask_afterwards": ("mul changes the probabilities", "* mask"),
    "miss_loss": ("Fenchel-Young loss", "entmax15_loss("),
    "miss_budget": ("budget", "budget_bisect("),
    "miss_relu": ("rectified scores", "F.relu(q @ k"),
    "miss_wrong_scale": ("multiplied by 1", "F.relu(z - ("),
}
NOTHING_OF_IT["corpus.entmax"] = {
    "miss_sdpa": "softmax",
    "miss_tabnet": "the rows are rewritten; there is no product that an attention would end in",
}

TRUE["entmax_spellings"] = {
    "another_mask_afterwards": ("where changes the probabilities", "torch.where(dropped.mT"),
    "a_weak_mask_and_the_same_afterwards": (
        "masked_fill changes the prob",
        ".masked_fill(dropped[:, None], 0.0)",
    ),
    "relu_squared": ("rectified scores", "torch.relu("),
    "relu_normalised": ("divided by their sum", "p / (p.sum("),
    "normmax": ("norm of the probabilities", "normmax_bisect("),
    "budget": ("budget", "budget_bisect("),
    "not_renormalised": ("ensure_sum_one=False", "entmax_bisect("),
    "few_steps": ("n_iter=4", "entmax_bisect("),
    "masked_before_and_after_a_triangle": ("masked twice are masked", "> 3"),
    "pooled_by_a_sum": ("scores come from sum", "k.sum(-1)"),
    "bilinear_scores_in_one_einsum": ("einsum of 3 tensors makes the scores", "torch.einsum("),
    "masked_afterwards": ("masked_fill changes the probabilities", "attn.masked_fill("),
    "attentions_returned": ("probabilities are also returned", "attn ="),
    "dropout_active": ("dropout is active", "F.dropout("),
    "over_queries": ("another axis", "dim=-2"),
    "renormalised_after_mask": ("mul changes the probabilities", "* mask[:, None"),
    "talking_heads": ("einsum changes the probabilities", "torch.einsum("),
    "soft_capped": ("tanh", "torch.tanh("),
    "tau_of_other_scale": ("multiplied by 1", "torch.clamp(x - tau"),
    "truncated_support": ("rows that sum to", "torch.clamp(x - c.gather("),
    "bisection_without_a_backward": ("gradient is not entmax's", "p / p.sum("),
    "straight_through": ("gradient is not entmax's", "StraightThrough.apply(x)"),
    "soft_threshold": ("multiplied by 1", "torch.relu(x - x.mean("),
    "scores_returned": ("scores are also returned", "scores ="),
    "alpha_one": ("alpha=1 is softmax", "alpha=1.0"),
    "probabilities_without_gradient": ("under no_grad", "attn ="),
    "cubed": ("power 3", "** 3"),
    "threshold_not_looked_for": ("multiplied by 1", "torch.relu(x - (x.amax("),
    "divided_by_more_than_their_sum": ("div changes the probabilities", "+ 1e-3"),
    "divided_by_the_sum_over_queries": ("div changes the probabilities", "p.sum(-2"),
    "empty_rows_divided_by_zero": ("mul changes the probabilities", "~dropped"),
    "floor_that_scores_reach": ("clamp between", ".clamp(min=-1e3)"),
    "rows_spread_by_a_mask": ("masked_fill spreads the scores", ".masked_fill("),
    "sequences_spread_by_a_mask": ("masked_fill spreads the scores", ".masked_fill("),
    "three_in_one_einsum": ("einsum of 3 tensors", "torch.einsum("),
    "zeroed_in_place": ("probabilities are changed in place", "p = "),
    "keys_written_before_the_values": ("changed in place between", "q @ k.mT"),
}
NOTHING_OF_IT["entmax_spellings"] = {
    "softmax": "softmax",
    "top_k_softmax": "softmax",
    "top_k_of_entmax": "softmax",
    "entmoid": "an activation, number by number",
    "hard_max": "one-hot vectors",
}
