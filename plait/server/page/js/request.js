/** What is sent: a conversation and the settings as the body of a request. Settings that are empty are not sent. */

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
];

/** Every setting that has to do with requests. */
export const SETTINGS = [
  ...NUMBERS,
  "system",
  "stop",
  "thinking",
  "tools",
  "probabilities",
  "top_logprobs",
];

/** The settings that mean the same to both kinds of request. */
export function sampling(settings) {
  const body = {};
  for (const name of NUMBERS) {
    const value = settings[name];
    if (value !== undefined && value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  if (settings.model) body.model = settings.model;
  const stops = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  return body;
}

/** The body of /v1/chat/completions. Raises an Error that says so if the tools are not JSON. */
export function chatBody(messages, settings) {
  const body = { messages: history(messages, settings.system ?? ""), ...sampling(settings), ...streamed() };
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: alternatives(settings) });
  if (settings.thinking) {
    const isOn = settings.thinking === "on";
    body.chat_template_kwargs = { enable_thinking: isOn, thinking: isOn };
  }
  const tools = ownTools(settings);
  if (tools.length) body.tools = tools;
  return body;
}

/** The tools that are written in the settings. Raises an Error that says so if they are not JSON. */
export function ownTools(settings) {
  const tools = (settings.tools ?? "").trim();
  return tools ? parsed(tools) : [];
}

function parsed(tools) {
  try {
    return JSON.parse(tools);
  } catch (error) {
    throw new Error(`The tools in the settings are not JSON: ${error.message}`);
  }
}

/** The body of /v1/completions: everything written so far is the prompt. */
export function textBody(messages, settings) {
  const prompt = messages.map((message) => message.content).join("");
  const body = { prompt, ...sampling(settings), ...streamed() };
  if (settings.probabilities) body.logprobs = alternatives(settings);
  return body;
}

const streamed = () => ({ stream: true, stream_options: { include_usage: true } });
const alternatives = (settings) => Number(settings.top_logprobs) || 5;

/**
 * What the model is told of the conversation. A question that got no reply goes with its failure: sent again it would
 * fail again, and templates want questions and replies in turn.
 */
function history(messages, system) {
  const sent = messages
    .filter((message, i) => !isEmpty(message) && !(message.role === "user" && isEmpty(messages[i + 1])))
    .map(plain);
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}

const isEmpty = (message) => message?.role === "assistant" && !message.content && !message.tool_calls?.length;

/** A message as the API has it. Templates drop earlier reasoning, so it is not sent again. */
function plain(message) {
  if (message.role === "tool")
    return { role: "tool", tool_call_id: message.tool_call_id, content: message.content };
  if (message.role !== "assistant") return { role: message.role, content: message.content };
  const found = { role: "assistant", content: message.content };
  if (message.tool_calls?.length) {
    found.tool_calls = message.tool_calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
  }
  return found;
}
