/** The server's API as this page uses it. Addresses are relative, so a proxy may serve it under a path. */

const KEY = "plait.key",
  ADMIN_KEY = "plait.admin-key";

/** The server said no, or could not be reached. `status` 0: no answer; `code` as in the error object. */
export class ApiError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** An API key lives in the tab's memory of this session, never in what stays. */
export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const knownKey = () => sessionStorage.getItem(KEY) ?? "";

/** The admin key lives there, too, and goes with nothing but an operator's requests. */
export function keepAdminKey(key) {
  if (key) sessionStorage.setItem(ADMIN_KEY, key);
  else sessionStorage.removeItem(ADMIN_KEY);
}

export const knownAdminKey = () => sessionStorage.getItem(ADMIN_KEY) ?? "";

/** A response that succeeded; with the API key, or with `key`. Raises ApiError, and AbortError when `signal` says so. */
export async function ask(path, { body, signal, key = knownKey() } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export const askJson = async (path, options) => (await ask(path, options)).json();
export const askText = async (path, options) => (await ask(path, options)).text();

/** What /health says, whatever its status: it is honest while the model loads, too. */
export async function health() {
  const headers = knownKey() ? { Authorization: `Bearer ${knownKey()}` } : {};
  try {
    return await (await fetch("health", { headers, cache: "no-store" })).json();
  } catch {
    return { status: "away" }; // no answer, or none of ours: either way there is no server to talk to
  }
}

/** The JSON of each event of a stream, until [DONE]. Raises ApiError for an error in the stream. */
export async function* events(path, body, signal) {
  const response = await ask(path, { body, signal });
  for await (const text of frames(response.body)) {
    if (text === "[DONE]") return;
    const event = JSON.parse(text);
    if (event.error) throw new ApiError(event.error.message, response.status, event.error.code);
    yield event;
  }
  throw new ApiError("The connection ended in the middle of the reply.", 0);
}

async function* frames(stream) {
  const reader = stream.getReader(),
    decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const whole = rest.split("\n\n");
      rest = whole.pop();
      for (const frame of whole) {
        if (frame.startsWith("data: ")) yield frame.slice(6);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost in the middle of the reply.", 0);
  } finally {
    reader.releaseLock();
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(message, response.status, code);
  } catch {
    return new ApiError(`${response.status} ${response.statusText}`, response.status);
  }
}
