/** Vercel's AI SDK over its providers for OpenAI (the Responses API) and Anthropic. */

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { MODEL, PARAMETERS, QUESTION, URL, expect, report } from "./common.mjs";

const servers = { baseURL: `${URL}/v1`, apiKey: "x" };
const models = [createOpenAI(servers)(MODEL), createAnthropic(servers)(MODEL)];
const asked = { prompt: QUESTION, maxOutputTokens: 96, maxRetries: 0 };

/** Do the same with both models. */
async function each(act) {
  for (const model of models) await act({ ...asked, model });
}

await report({
  chat: () => each(async (wanted) => expect((await generateText(wanted)).text)),
  stream: () =>
    each(async (wanted) => {
      let text = "";
      for await (const part of streamText(wanted).textStream) text += part;
      expect(text);
    }),
  tools: () =>
    each(async (wanted) => {
      const weather = tool({ description: "The weather of a city.", inputSchema: jsonSchema(PARAMETERS) });
      const toolChoice = { type: "tool", toolName: "weather" };
      const made = await generateText({ ...wanted, tools: { weather }, toolChoice });
      expect("city" in made.toolCalls[0].input);
    }),
  schema: () =>
    each(async (wanted) => {
      const output = Output.object({ schema: jsonSchema(PARAMETERS) });
      expect("city" in (await generateText({ ...wanted, output })).output);
    }),
});
