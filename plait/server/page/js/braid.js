/** Three strands, one over the other in turn: the mark of Plait, drawn along a line. */

import { draw } from "./dom.js";

const WIDTH = 240,
  MIDDLE = 32,
  REACH = 19,
  PIECES = 54,
  TURNS = 2.5;

/** Fill an SVG of 240 by 64 with a braid. Pieces lie in the order of their depth, each with a rim under it. */
export function drawBraid(svg) {
  const pieces = [];
  for (let strand = 0; strand < 3; strand++) {
    for (let i = 0; i < PIECES; i++) pieces.push(piece(strand, i / PIECES, (i + 1) / PIECES));
  }
  pieces.sort((a, b) => a.depth - b.depth);
  for (const { path, strand } of pieces) {
    svg.append(
      draw("path", { d: path, class: "rim" }),
      draw("path", { d: path, class: `strand s${strand}` }),
    );
  }
}

function piece(strand, from, to) {
  const points = [];
  for (let k = 0; k <= 4; k++) {
    const t = from - 0.004 + ((to - from + 0.008) * k) / 4;
    points.push(`${(t * WIDTH).toFixed(1)} ${(MIDDLE + REACH * Math.sin(angle(strand, t))).toFixed(1)}`);
  }
  return { path: `M${points.join("L")}`, strand, depth: Math.sin(2 * angle(strand, (from + to) / 2)) };
}

function angle(strand, t) {
  return 2 * Math.PI * (TURNS * t + strand / 3) + 0.35;
}
