/** Vercel's AI SDK over its OpenAI-compatible provider. */

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, jsonSchema, streamText, tool } from "ai";
import { MODEL, PARAMETERS, QUESTION, URL, expect, report } from "./common.mjs";

const provider = createOpenAICompatible({
  name: "plait",
  baseURL: `${URL}/v1`,
  apiKey: "x",
  supportsStructuredOutputs: true,
});
const asked = { model: provider.chatModel(MODEL), prompt: QUESTION, maxOutputTokens: 96, maxRetries: 0 };

await report({
  chat: async () => expect((await generateText(asked)).text),
  stream: async () => {
    let text = "";
    for await (const part of streamText(asked).textStream) text += part;
    expect(text);
  },
  tools: async () => {
    const weather = tool({ description: "The weather of a city.", inputSchema: jsonSchema(PARAMETERS) });
    const made = await generateText({ ...asked, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } });
    expect("city" in made.toolCalls[0].input);
  },
  schema: async () => {
    const output = Output.object({ schema: jsonSchema(PARAMETERS) });
    expect("city" in (await generateText({ ...asked, output })).output);
  },
  embeddings: async () =>
    expect((await embed({ model: provider.textEmbeddingModel(MODEL), value: "a", maxRetries: 0 })).embedding),
});
