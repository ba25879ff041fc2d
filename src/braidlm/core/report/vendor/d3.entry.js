// The parts of d3 that charts.js uses. How d3.js is made from this file: README.md.
export { bisectCenter, extent, ticks } from "d3-array";
export { scaleLinear, scaleLog } from "d3-scale";
export { line } from "d3-shape";
