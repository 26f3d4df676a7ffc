"""llama-cpp-python, with requests as lines of JSON: FILE THREADS CONTEXT. Needs nothing of Plait.

Its `generate` keeps the tokens that the last prompt and reply have in common with the next prompt.
"""

import json
import os
import sys
import time

from llama_cpp import Llama


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")  # what the library prints is not for who asks
    os.dup2(2, 1)
    llama = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        if asked["forgets"]:
            llama.reset()
        began, first, reply = time.perf_counter(), 0.0, []
        for token in llama.generate(asked["prompt"], temp=0.0, top_k=1, min_p=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - began
            reply.append(token)
            if len(reply) == asked["num_tokens"]:
                break
        answers.write(json.dumps({"first_s": first, "reply": reply}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
