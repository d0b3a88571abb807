#include "gguf_flash_models.h"

#include "llama-model-loader.h"

#include <map>
#include <stdexcept>
#include <string>

llm_ffn_op_type hidden_activation(llama_model_loader & ml, llm_ffn_op_type otherwise) {
    std::string activation;
    if (!ml.get_key(LLM_KV_HIDDEN_ACT, activation, false)) {
        return otherwise;
    }
    static const std::map<std::string, llm_ffn_op_type> known = {
        { "relu", LLM_FFN_RELU }, { "relu_sqr", LLM_FFN_RELU_SQR }, { "gelu", LLM_FFN_GELU }, { "silu", LLM_FFN_SILU }
    };
    const auto found = known.find(activation);
    if (found == known.end()) {
        throw std::runtime_error(ml.arch_name + ".hidden_activation is '" + activation +
                                 "', expected relu, relu_sqr, gelu or silu");
    }
    return found->second;
}
