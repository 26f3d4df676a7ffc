/** Ollama's client for Node. */

import { Ollama } from "ollama";
import { MESSAGES, MODEL, PARAMETERS, URL, expect, report } from "./common.mjs";

const client = new Ollama({ host: URL });
const asked = { model: MODEL, messages: MESSAGES, options: { num_predict: 96 } };

await report({
  chat: async () => expect((await client.chat(asked)).message.content),
  stream: async () => {
    let text = "";
    for await (const part of await client.chat({ ...asked, stream: true })) text += part.message.content;
    expect(text);
  },
  schema: async () => {
    const made = await client.chat({ ...asked, format: PARAMETERS });
    expect("city" in JSON.parse(made.message.content));
  },
  embeddings: async () => expect((await client.embed({ model: MODEL, input: ["a", "b"] })).embeddings[1]),
});
