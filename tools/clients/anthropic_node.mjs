/** Anthropic's client for Node. */

import Anthropic from "@anthropic-ai/sdk";
import { MESSAGES, MODEL, PARAMETERS, URL, expect, report } from "./common.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "x" });
const asked = { model: MODEL, max_tokens: 96, messages: MESSAGES };

await report({
  chat: async () => expect((await client.messages.create(asked)).content[0].text),
  stream: async () => expect(await client.messages.stream(asked).finalText()),
  tools: async () => {
    const weather = { name: "weather", description: "The weather of a city.", input_schema: PARAMETERS };
    const choice = { type: "tool", name: "weather" };
    const made = await client.messages.create({ ...asked, tools: [weather], tool_choice: choice });
    expect("city" in made.content.find((part) => part.type === "tool_use").input);
  },
  schema: async () => {
    const form = { format: { type: "json_schema", schema: PARAMETERS } };
    const made = await client.messages.create({ ...asked, output_config: form });
    expect("city" in JSON.parse(made.content[0].text));
  },
});
