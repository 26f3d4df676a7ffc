/**
 * Versions of a message: a reply that was written again, or a question that was edited, keeps what it was, with all
 * that came after it. A message has `versions`, the others in their order, and `at`, its own place among them.
 */

const MAX_VERSIONS = 50;

/** Have `fresh` take the place of `old`, with which `after` went. */
export function replaces(fresh, old, after) {
  const all = [...(old.versions ?? [])];
  all.splice(old.at ?? 0, 0, versionOf(old, after));
  fresh.versions = all.slice(-MAX_VERSIONS);
  fresh.at = fresh.versions.length;
  return fresh;
}

/** How many there are, and which of them is shown, from 1. */
export const count = (message) => (message.versions?.length ?? 0) + 1;
export const place = (message) => (message.at ?? 0) + 1;

/** The message and all after it, in the version that is `step` away; null where there is none. */
export function turned(message, after, step) {
  const to = (message.at ?? 0) + step;
  if (to < 0 || to >= count(message)) return null;
  const all = [...(message.versions ?? [])];
  all.splice(message.at ?? 0, 0, versionOf(message, after));
  const [{ after: next, ...shown }] = all.splice(to, 1);
  return [{ ...shown, versions: all, at: to }, ...next];
}

function versionOf({ versions: _, at: __, ...message }, after) {
  return { ...message, after };
}
