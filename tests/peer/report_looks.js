// What is drawn on a page of `spile report`: look() returns facts and faults, and test_report.py judges them.
function parse(colour) {
  const parts = colour.match(/[\d.]+/g).map(Number);
  return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
}

function luminance(rgb) {
  const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(a, b) {
  const [x, y] = [luminance(a), luminance(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}

// The colour behind an element: that of the nearest one above it that has one.
function ground(window, element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(window.getComputedStyle(at).backgroundColor);
    if (colour.alpha === 1) return colour.rgb;
  }
  return window.matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
}

function worstContrast(window, document) {
  let worst = {ratio: 99, text: ''};
  const see = (ratio, text) => { if (ratio < worst.ratio) worst = {ratio, text}; };
  for (const text of document.querySelectorAll('svg text')) {
    see(contrast(parse(window.getComputedStyle(text).fill).rgb, ground(window, text.closest('div, figure, body'))), text.textContent);
  }
  const walk = document.createTreeWalker(document.body, 4);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.closest('svg, script, style') || !element.getClientRects().length) continue;
    see(contrast(parse(window.getComputedStyle(element).color).rgb, ground(window, element)), walk.currentNode.data);
  }
  return worst;
}

// Texts of one drawing that share a place, or leave it.
function misplaced(svg) {
  const view = svg.viewBox.baseVal, faults = [];
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
  boxes.forEach(([text, a], number) => {
    const half = 0.5;
    if (a.x < view.x - half || a.y < view.y - half || a.x + a.width > view.width + half || a.y + a.height > view.height + half)
      faults.push(`"${text}" leaves the drawing`);
    for (const [other, b] of boxes.slice(number + 1)) {
      const across = Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x);
      const down = Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
      if (across > half && down > half) faults.push(`"${text}" overlaps "${other}"`);
    }
  });
  return faults;
}

function figure(window, document, one) {
  one.focus();
  const drawings = [...one.querySelectorAll('svg.plot')];
  const named = svg => ['title', 'desc'].every(tag => (svg.querySelector(tag)?.textContent || '').trim());
  const panels = drawings.filter(svg => svg.querySelector('.m'));
  const inside = mark => {
    const view = mark.ownerSVGElement.viewBox.baseVal, box = mark.getBBox();
    return box.x >= -1 && box.y >= -1 && box.x + box.width <= view.width + 1 && box.y + box.height <= view.height + 1;
  };
  return {
    name: one.dataset.figure,
    focused: document.activeElement === one,
    outlined: window.getComputedStyle(one).outlineStyle !== 'none',
    panels: panels.length,
    named: drawings.every(svg => svg.getAttribute('role') === 'img' && named(svg)),
    axes: panels.every(svg => svg.querySelectorAll('line.a').length > 0 || svg.querySelector('rect.m[class*=" h"]')),
    ticks: panels.every(svg => svg.querySelectorAll('text').length > 3),
    marks: one.querySelectorAll('.m').length,
    inside: [...one.querySelectorAll('.m')].every(inside),
    values: one.querySelectorAll('details tbody tr').length,
    series: new Set([...one.querySelectorAll('text[class^=t]')].map(text => text.textContent)).size,
    faults: drawings.flatMap(misplaced),
    narrowest: Math.min(...drawings.map(svg => svg.getBoundingClientRect().width)),
  };
}

function look(window, document) {
  const root = document.documentElement;
  return {
    width: window.innerWidth,
    dark: window.matchMedia('(prefers-color-scheme: dark)').matches,
    overflow: root.scrollWidth - root.clientWidth,
    contrast: worstContrast(window, document),
    figures: [...document.querySelectorAll('figure')].map(one => figure(window, document, one)),
    reachable: [...document.querySelectorAll('figure, summary, .scroll, a')].every(one => one.tabIndex === 0),
    links: [...document.querySelectorAll('a')].every(one => document.getElementById(one.getAttribute('href').slice(1))),
  };
}
