"""llama-cpp-python on a flash-GGUF, with no change of its own and with the engine's settings.

python 02_llama_cpp_python.py [MODEL.flash.gguf]
"""

import sys
import tempfile
from pathlib import Path

import gguf_flash

gguf_flash.activate()  # before llama_cpp is imported: it chooses the libraries

import llama_cpp  # noqa: E402

from gguf_flash.converters import convert  # noqa: E402
from gguf_flash.demo import demo_model  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        model = str(Path(folder) / "model.flash.gguf")
        convert(demo_model(), model, select="all")

    plain = llama_cpp.Llama(model, n_ctx=256, verbose=False)
    print(plain.create_completion("The sea is", max_tokens=24, temperature=0)["choices"][0]["text"])
    plain.close()

    llm = gguf_flash.FlashLlama(model, ram="60%", window=5, n_ctx=256)
    question = [{"role": "user", "content": "Why is the sea salty?"}]
    answer = llm.create_chat_completion(question, max_tokens=24, temperature=0)
    print(answer["choices"][0]["message"]["content"])
    total = llm.flash_stats()["total"]
    print(f"{total['bytes_read']} bytes in {total['requests']} requests, {total['hits']} hits")
    llm.close()
