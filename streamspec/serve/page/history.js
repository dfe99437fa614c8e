// Keeps conversations in this browser (localStorage, of this address and port alone), the newest first.

const KEY = "streamspec-conversations", OFF = "streamspec-keep-none";
const MOST = 50; // conversations
const LONGEST = 2_000_000; // characters of all together; browsers have room for some 5 million

/** All that are kept: {id, at, title, system, turns}; `turns`: of {asked, pieces, drafted, reasoning}. */
export function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return []; // none of ours, or no storage here
  }
}

export function keeps() {
  try {
    return localStorage.getItem(OFF) === null;
  } catch {
    return false;
  }
}

/** Whether to keep conversations from now on; those kept are deleted with `false`. */
export function setKeeping(is) {
  try {
    if (is) localStorage.removeItem(OFF);
    else {
      localStorage.setItem(OFF, "1");
      localStorage.removeItem(KEY);
    }
  } catch { /* no storage here: nothing is kept */ }
}

/** Keeps `conversation` in the place of an earlier state of it; the oldest give way. */
export function keep(conversation) {
  if (!keeps() || !conversation.turns.length) return;
  const all = [conversation, ...kept().filter((other) => other.id !== conversation.id)].slice(0, MOST);
  write(all);
}

export function remove(id) {
  write(kept().filter((conversation) => conversation.id !== id));
}

function write(all) {
  for (let count = all.length; count; count = Math.floor(count / 2)) {
    const text = JSON.stringify(all.slice(0, count));
    if (text.length > LONGEST) continue;
    try {
      localStorage.setItem(KEY, text);
      return;
    } catch { /* full: fewer of them */ }
  }
  localStorage.removeItem(KEY);
}
