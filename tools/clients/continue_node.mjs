/** Continue: its adapters for OpenAI's API, and its command `cn` over these and as with Ollama. */

import { execFile } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { constructLlmApi } from "@continuedev/openai-adapters";
import { MESSAGES, MODEL, PARAMETERS, QUESTION, URL, expect, report } from "./common.mjs";

const api = constructLlmApi({ provider: "vllm", apiKey: "x", apiBase: `${URL}/v1/` });
const asked = { model: MODEL, messages: MESSAGES, max_tokens: 96 };
const { signal } = new AbortController();

/** What `cn` prints for a prompt, with a provider's settings. */
async function ask(provider, apiBase) {
  const home = mkdtempSync(join(tmpdir(), "continue-"));
  const model = { name: MODEL, provider, model: MODEL, apiBase, apiKey: "x", roles: ["chat"] };
  model.defaultCompletionOptions = { temperature: 0, maxTokens: 48 };
  try {
    const config = join(home, "config.yaml");
    writeFileSync(config, JSON.stringify({ name: "here", version: "1.0.0", schema: "v1", models: [model] })); // YAML, too
    const env = { ...process.env, HOME: home, CONTINUE_TELEMETRY_ENABLED: "0" };
    const run = promisify(execFile)("node_modules/.bin/cn", ["--config", config, "-p", QUESTION], { env, timeout: 120000 });
    run.child.stdin.end();
    return (await run).stdout.trim();
  } finally {
    rmSync(home, { recursive: true, force: true });
  }
}

await report({
  chat: async () => expect((await api.chatCompletionNonStream({ ...asked, stream: false }, signal)).choices[0].message.content),
  stream: async () => {
    let text = "";
    for await (const part of api.chatCompletionStream({ ...asked, stream: true }, signal))
      text += part.choices[0]?.delta.content ?? "";
    expect(text);
  },
  tools: async () => {
    const tools = [{ type: "function", function: { name: "weather", parameters: PARAMETERS } }];
    const tool_choice = { type: "function", function: { name: "weather" } };
    const made = await api.chatCompletionNonStream({ ...asked, stream: false, tools, tool_choice }, signal);
    expect("city" in JSON.parse(made.choices[0].message.tool_calls[0].function.arguments));
  },
  embeddings: async () => expect((await api.embed({ model: MODEL, input: ["a", "b"] })).data[1].embedding),
  completions: async () => {
    let text = "";
    for await (const part of api.completionStream({ model: MODEL, prompt: QUESTION, max_tokens: 24, stream: true }, signal))
      text += part.choices[0]?.text ?? "";
    expect(text);
  },
  cn: async () => {
    expect(await ask("openai", `${URL}/v1`));
    expect(await ask("ollama", URL));
  },
});
