/** Prometheus's text format, and what can be said from two scrapes of it. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** A scrape: name -> list of {labels, value}. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(LABEL)) labels[key] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** The sum of a metric's samples; 0 if there is none. */
export const total = (scrape, name) => (scrape.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);

/** A metric's samples by one label: {value of the label: number}. */
export function byLabel(scrape, name, label) {
  const found = {};
  for (const { labels, value } of scrape.get(name) ?? [])
    found[labels[label]] = (found[labels[label]] ?? 0) + value;
  return found;
}

/** A histogram: ascending [bound, number of values up to it], the last bound Infinity. */
export function buckets(scrape, name) {
  const samples = scrape.get(`${name}_bucket`) ?? [];
  return samples
    .map(({ labels, value }) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value])
    .sort((a, b) => a[0] - b[0]);
}

/** The buckets of what came between two scrapes. */
export const between = (newer, older) =>
  newer.map(([bound, count], i) => [bound, count - (older[i]?.[1] ?? 0)]);

/** The value below which a share of the values lies, evenly spread in its bucket; null if there are none. */
export function quantile(found, share) {
  const all = found.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let low = 0,
    below = 0;
  for (const [bound, count] of found) {
    if (count >= share * all) {
      if (bound === Infinity) return low;
      return count === below ? bound : low + ((bound - low) * (share * all - below)) / (count - below);
    }
    low = bound;
    below = count;
  }
  return low;
}
