// Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) read by fetch, which can send an
// Authorization header; EventSource cannot.

import { NetworkError } from "./errors.js";
import { unlessAborted } from "./time.js";

// An event of Stampede has less than 2 KiB.
const eventCharactersMax = 1 << 20;

/**
 * Reads the data of the events of an answer. `onActivity` is called for everything that arrives, heartbeats included,
 * and `onRetry` with the pause before a new connection that the server asks for. An event that is cut off at the end of
 * the stream is dropped, as the specification wants it.
 */
export async function* readEvents(
  body: ReadableStream<Uint8Array>,
  signal: AbortSignal,
  onActivity: () => void,
  onRetry: (ms: number) => void,
): AsyncGenerator<string, void, undefined> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await unlessAborted(reader.read(), signal).catch((error: unknown) => {
        throw new NetworkError("the stream was cut off", { cause: error });
      });
      if (done) return;
      onActivity();
      // A line may end with \r\n: a \r at the end of what has arrived waits for what follows.
      const lines = (rest + decoder.decode(value, { stream: true })).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (field === "data") data.push(text ?? "");
        else if (field === "retry" && /^\d{1,5}$/.test(text ?? "")) onRetry(Number(text));
      }
      if (rest.length + data.reduce((sum, line) => sum + line.length, 0) > eventCharactersMax) {
        throw new NetworkError("an event is too large");
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
