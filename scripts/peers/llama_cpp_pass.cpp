// Passes of llama.cpp's library over ids that stand in its cache: what a step costs, without a server.
//
//     llama_cpp_pass MODEL.gguf THREADS CAPACITY
//
// Each line of stdin is a pass: how many tokens of the cache stay, how many of the last rows have
// logits, a file for these in float32 or -, and the ids. The answer is the most likely token after the
// first of those rows.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc != 4) {
        return fprintf(stderr, "usage: %s MODEL.gguf THREADS CAPACITY\n", argv[0]), 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) fputs(text, stderr);
    }, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params sizes = llama_context_default_params();
    sizes.n_threads = sizes.n_threads_batch = std::stoi(argv[2]);
    sizes.n_ctx = sizes.n_batch = std::stoi(argv[3]);
    sizes.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context * context = model ? llama_init_from_model(model, sizes) : nullptr;
    if (!context) {
        return fprintf(stderr, "%s was not opened.\n", argv[1]), 1;
    }
    const int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(sizes.n_ctx, 0, 1);
    std::cout << "ready" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream fields(line);
        int kept, rows, count = 0;
        std::string file;
        fields >> kept >> rows >> file;
        for (llama_token id; fields >> id; ++count) {
            batch.token[count] = id;
            batch.pos[count] = kept + count;
            batch.n_seq_id[count] = 1;
            batch.seq_id[count][0] = 0;
        }
        for (int i = 0; i < count; ++i) {
            batch.logits[i] = i >= count - rows;
        }
        batch.n_tokens = count;
        llama_memory_seq_rm(llama_get_memory(context), 0, kept, -1);
        if (llama_decode(context, batch)) {
            return fprintf(stderr, "A pass of %d ids behind %d failed.\n", count, kept), 1;
        }
        const float * first = llama_get_logits_ith(context, count - rows);
        if (file != "-") {
            std::ofstream out(file, std::ios::binary);
            out.write((const char *) llama_get_logits(context), sizeof(float) * words * rows);
        }
        std::cout << std::max_element(first, first + words) - first << std::endl;
    }
}
