// One answer from the server: what is sent, what comes back, and what went wrong in words.

import { fenced } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens"];

export function requestBody(nodes, options) {
  const messages = nodes.filter(isWorthSending).map(({ role, content, reasoning_content, tool_calls, tool_call_id, files }) => {
    const text = [...(files ?? []).map((file) => fenced(file.text, "", `File ${file.name}:`)), content].join("\n\n");
    return JSON.parse(JSON.stringify({ role, content: text, reasoning_content, tool_calls, tool_call_id }));
  });
  if (options.system?.trim()) messages.unshift({ role: "system", content: options.system });
  const body = { messages, stream: true, stream_options: { include_usage: true }, reasoning_effort: options.mode };
  for (const name of NUMBERS) if ((options[name] ?? "") !== "") body[name] = Number(options[name]);
  if (options.tools?.trim()) body.tools = JSON.parse(options.tools);
  return body;
}

const isWorthSending = (node) => node.role !== "assistant" || node.content || node.reasoning_content || node.tool_calls;

export async function* streamAnswer(body, headers, signal) {
  let response;
  try {
    response = await fetch("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal, headers: { "content-type": "application/json", ...headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server at ${location.host} cannot be reached. Your message is kept; is the server running?`);
  }
  if (!response.ok) throw new Error(await refusal(response));
  for await (const chunk of events(response.body.getReader())) {
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

async function refusal(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no error of ours: perhaps a proxy's page
  }
  if (response.status === 401) return `${message} (enter the key in Settings)`;
  const seconds = response.headers.get("retry-after");
  return seconds ? `${message} (try again in ${seconds} s)` : message;
}

async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      piece = { done: true };
    }
    rest += decoder.decode(piece.value ?? new Uint8Array(), { stream: !piece.done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
    if (piece.done) throw new Error("The connection broke off. What had come is kept.");
  }
}

export function takeDelta(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } });
    call.function.arguments += piece.function.arguments ?? "";
  }
}
