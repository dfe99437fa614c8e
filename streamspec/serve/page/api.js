// Talks to the server: the token, the models, one answer as a stream of events.

const KEY = "streamspec-token";

/** A request that was refused, with the server's own line. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token);
}

/** Takes `#token=...` out of the address, if it is there; whether it was. */
export function takeToken() {
  const found = location.hash.match(/^#token=(.+)$/);
  if (!found) return false;
  let token = found[1];
  try {
    token = decodeURIComponent(token);
  } catch { /* a token with a bare % */ }
  keepToken(token);
  history.replaceState(null, "", location.pathname);
  return true;
}

/** The models that requests may ask for, the sampling that their answers begin with, and whether they think; the first is the bundle itself. */
export async function models() {
  const answer = await (await send("/v1/models", {})).json();
  return new Map(answer.data.map((model) => [model.id, model.streamspec]));
}

/** Chunks of one answer (docs/guides/serve.md). Aborting `signal` ends the generation too. Throws Refused, also in the middle. */
export async function* ask(body, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the connection ended before the answer did");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new Refused(0, message.error.message);
      yield message;
    }
  }
}

async function send(path, options) {
  const token = sessionStorage.getItem(KEY) ?? "";
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${token}` } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `the server answered ${response.status}`);
}
