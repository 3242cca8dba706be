#pragma once

// Included by upstream's llama-graph.h, whose names it uses.

// what goes into layers, kept on the device
struct llama_layer_inp_ring {
    std::vector<int32_t>       lids;
    std::vector<ggml_tensor *> rows; // F32 [n_embd, n_rows] for each of lids

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
};

class llm_graph_input_ring_rows : public llm_graph_input_i {
public:
    llm_graph_input_ring_rows(const llama_cparams & cparams) : batch_rows(cparams.layer_inp_rows) {}
    virtual ~llm_graph_input_ring_rows() = default;

    void set_input(const llama_ubatch * ubatch) override;

    bool can_reuse(const llm_graph_params & params) override;

    ggml_tensor * rows = nullptr; // I32 [n], of the first n tokens

    const std::vector<int32_t> * batch_rows;
};
