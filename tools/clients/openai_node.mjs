/** OpenAI's client for Node. */

import OpenAI from "openai";
import { MESSAGES, MODEL, PARAMETERS, QUESTION, URL, expect, report } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "x" });
const asked = { model: MODEL, messages: MESSAGES, max_tokens: 96 };
const function_ = { name: "weather", description: "The weather of a city.", parameters: PARAMETERS };

await report({
  chat: async () => expect((await client.chat.completions.create(asked)).choices[0].message.content),
  stream: async () => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    expect(text);
  },
  tools: async () => {
    const made = await client.chat.completions.create({
      ...asked,
      tools: [{ type: "function", function: function_ }],
      tool_choice: { type: "function", function: { name: "weather" } },
    });
    expect("city" in JSON.parse(made.choices[0].message.tool_calls[0].function.arguments));
  },
  schema: async () => {
    const form = { type: "json_schema", json_schema: { name: "place", schema: PARAMETERS, strict: true } };
    const made = await client.chat.completions.create({ ...asked, response_format: form });
    expect("city" in JSON.parse(made.choices[0].message.content));
  },
  embeddings: async () => expect((await client.embeddings.create({ model: MODEL, input: ["a", "b"] })).data[1]),
  responses: async () => {
    const wanted = { model: MODEL, input: QUESTION, temperature: 0 };
    const streamed = (await client.responses.stream(wanted).finalResponse()).output_text;
    expect(streamed && (await client.responses.create(wanted)).output_text === streamed);
  },
});
