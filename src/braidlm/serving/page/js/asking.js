/** Answers of the server as they are now: asked again when the question changes, older answers never shown for newer. */
import { useCallback, useEffect, useRef, useState } from "./ui.js";

/**
 * The answer to a question that follows from the state of the page.
 * @param {(signal: AbortSignal) => Promise<any>} question
 * @param {any[]} about what the answer depends on; null or undefined in it asks nothing
 * @param {number} rest milliseconds to wait for further changes
 */
export function useAnswer(question, about, rest = 0) {
  const [seen, see] = useState({ answer: null, error: null, busy: false });
  useEffect(() => {
    if (about.some((one) => one === null || one === undefined || one === "")) {
      see({ answer: null, error: null, busy: false });
      return undefined;
    }
    const stopping = new AbortController();
    see((old) => ({ ...old, busy: true }));
    const timer = setTimeout(async () => {
      try {
        const answer = await question(stopping.signal);
        if (!stopping.signal.aborted) see({ answer, error: null, busy: false });
      } catch (error) {
        if (!stopping.signal.aborted) see({ answer: null, error: error.message, busy: false });
      }
    }, rest);
    return () => {
      clearTimeout(timer);
      stopping.abort();
    };
  }, about.map((one) => (typeof one === "object" ? JSON.stringify(one) : one)));
  return seen;
}

/** Work that a button starts and another stops: `[{busy, error}, start, stop]`; what starts anew stops what ran. */
export function useWork() {
  const [seen, see] = useState({ busy: false, error: null });
  const running = useRef(null);
  const stop = useCallback(() => running.current?.abort(), []);
  const start = useCallback(async (work) => {
    running.current?.abort();
    const stopping = new AbortController();
    running.current = stopping;
    see({ busy: true, error: null });
    let error = null;
    try {
      await work(stopping.signal);
    } catch (raised) {
      if (!stopping.signal.aborted) error = raised.message;
    }
    if (running.current === stopping) see({ busy: false, error });
  }, []);
  useEffect(() => stop, []);
  return [seen, start, stop];
}
